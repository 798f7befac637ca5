#include <gtest/gtest.h>

#include "model/layer_weights.h"

namespace perigee {
namespace {

constexpr MlaShape kK2{.heads = 64, .nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 1};

MlaForm prompt(int64_t new_tokens, int64_t context) {
  return choose_mla_form(kK2, TokenKind::kPrompt, new_tokens, context);
}
MlaForm outputs(int64_t new_tokens, int64_t context) {
  return choose_mla_form(kK2, TokenKind::kOutput, new_tokens, context);
}

TEST(MlaForm, APromptIsExpandedWhateverWasCached) {
  for (const int64_t context : {int64_t{0}, int64_t{64}, kOneFormTokens})
    for (const int64_t new_tokens : {1, 2, 170, 100'000}) EXPECT_EQ(prompt(new_tokens, context), MlaForm::kExpanded);
}

TEST(MlaForm, OutputsAreAbsorbedWhateverWasPreempted) {
  for (const int64_t context : {int64_t{0}, int64_t{64}, kOneFormTokens - 1})
    for (const int64_t new_tokens : {int64_t{1}, kOneFormTokens - context})
      EXPECT_EQ(outputs(new_tokens, context), MlaForm::kAbsorbed);
}

TEST(MlaForm, OnALongContextExpandingPaysFrom171Tokens) {
  for (const auto form : {prompt, outputs}) {
    EXPECT_EQ(form(170, 10'000'000), MlaForm::kAbsorbed);
    EXPECT_EQ(form(171, 10'000'000), MlaForm::kExpanded);
    EXPECT_EQ(form(8, 10'000), MlaForm::kAbsorbed);
    EXPECT_EQ(form(168, kOneFormTokens + 1), MlaForm::kExpanded) << "some of its pairs are its own";
  }
}

}  // namespace
}  // namespace perigee

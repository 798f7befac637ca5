#include "model/mla_form.h"

#include <gtest/gtest.h>

namespace perigee {
namespace {

constexpr MlaShape kK2{.heads = 64, .nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 1};

TEST(MlaForm, OneTokenAndDeterministicRunsAreAbsorbed) {
  for (const int64_t context : {0, 1, 1000, 1000000}) {
    EXPECT_EQ(choose_mla_form(kK2, 1, context, false), MlaForm::kAbsorbed);
    EXPECT_EQ(choose_mla_form(kK2, 4096, context, true), MlaForm::kAbsorbed);
  }
}

TEST(MlaForm, APromptWithoutContextIsExpanded) {
  EXPECT_EQ(choose_mla_form(kK2, 2, 0, false), MlaForm::kExpanded);
  EXPECT_EQ(choose_mla_form(kK2, 4096, 0, false), MlaForm::kExpanded);
}

TEST(MlaForm, OnALongContextItPaysFrom171Tokens) {
  EXPECT_EQ(choose_mla_form(kK2, 170, 10'000'000, false), MlaForm::kAbsorbed);
  EXPECT_EQ(choose_mla_form(kK2, 171, 10'000'000, false), MlaForm::kExpanded);
  EXPECT_EQ(choose_mla_form(kK2, 8, 10'000, false), MlaForm::kAbsorbed);
  EXPECT_EQ(choose_mla_form(kK2, 160, 1'000, false), MlaForm::kExpanded);  // half of its pairs are its own
}

}  // namespace
}  // namespace perigee

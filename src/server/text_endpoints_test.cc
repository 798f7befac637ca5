#include "server/text_endpoints.h"

#include <gtest/gtest.h>

#include "text/test_vocabulary.h"

namespace perigee {
namespace {

TEST(TextEndpoints, DetokenizeGivesSpecialTokensToo) {
  const auto text = ModelText::make(test_tokenizer(), nullptr, false, {});
  RequestContext context;
  context.served_names = {"tiny"};
  context.vocab = text->tokenizer()->vocab_size();
  const Json body(Json::Object{{"tokens", Json(Json::Array{Json(97), Json(258), Json(98)})}});
  const Result<Json> reply = detokenize(body, context, *text);
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(*reply->find("prompt"), Json("a<|im_end|>b"));
}

}  // namespace
}  // namespace perigee

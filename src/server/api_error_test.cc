#include "server/api_error.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace perigee {
namespace {

TEST(ApiError, EveryStatusHasAWordOfTheTable) {
  const std::pair<int, const char*> table[] = {{400, "BadRequestError"},      {401, "AuthenticationError"},
                                               {404, "NotFoundError"},        {405, "MethodNotAllowedError"},
                                               {408, "TimeoutError"},         {413, "RequestTooLargeError"},
                                               {415, "BadRequestError"},      {429, "RateLimitError"},
                                               {431, "RequestTooLargeError"}, {500, "InternalServerError"},
                                               {417, "BadRequestError"},      {505, "NotImplementedError"},
                                               {501, "NotImplementedError"},  {503, "ServiceUnavailableError"},
                                               {504, "TimeoutError"}};
  for (const auto& [status, type] : table) {
    EXPECT_STREQ(error_type(status), type);
    const HttpReply reply = error_reply(status, "m", "p");
    EXPECT_EQ(reply.status, status);
    EXPECT_EQ(reply.body, fmt::format("{}{}{}{}}}}}", R"({"error":{"message":"m","type":")", type,
                                      R"(","param":"p","code":)", status));
    const auto retry = std::find_if(reply.headers.begin(), reply.headers.end(),
                                    [](const auto& header) { return header.first == "Retry-After"; });
    EXPECT_EQ(retry != reply.headers.end(), status == 429 || status == 503) << status;
  }
  EXPECT_EQ(error_reply(404, "m").body, R"({"error":{"message":"m","type":"NotFoundError","param":null,"code":404}})");
}

TEST(ApiError, EveryCodeHasItsStatus) {
  const std::pair<Code, int> table[] = {{Code::kBadInput, 400},  {Code::kNotFound, 404},    {Code::kTooLarge, 413},
                                        {Code::kExhausted, 429}, {Code::kUnavailable, 503}, {Code::kCancelled, 503},
                                        {Code::kDeadline, 504},  {Code::kDeviceLost, 500}};
  for (const auto& [code, status] : table) EXPECT_EQ(error_reply(Error(code, "m")).status, status);
}

TEST(ApiError, WhateverAClientSentTheBodyIsBoundedAndValid) {
  for (const std::string& text : {std::string(5000, '\xFF'), std::string("\xED\xA0\x80 \xC3"), std::string(3, '\0'),
                                  std::string(1023, 'a') + "\xC3\xA9", std::string(100000, '"')}) {
    const HttpReply reply = error_reply(400, text, text);
    const auto parsed = parse_json(reply.body);  // refuses invalid UTF-8
    ASSERT_TRUE(parsed.ok()) << parsed.error().message;
    EXPECT_LE(parsed->find("error")->find("message")->as_string().size(), kMaxErrorMessageBytes + 3);
    EXPECT_LE(parsed->find("error")->find("param")->as_string().size(), kMaxErrorParamBytes + 3);
  }
}

}  // namespace
}  // namespace perigee

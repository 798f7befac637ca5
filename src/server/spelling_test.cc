#include "server/spelling.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace perigee {
namespace {

const std::vector<std::string_view> kKnown = {"n",     "max_tokens", "min_tokens",     "temperature", "top_p",
                                              "top_k", "stop",       "stop_token_ids", "user",        "logprobs"};

std::string meant(std::string_view given) {
  return std::string(nearest_name(given, kKnown).value_or("-"));
}

TEST(Spelling, TheNearestOfTheKnownNames) {
  const std::pair<const char*, const char*> table[] = {
      {"max_token", "max_tokens"},
      {"maxTokens", "max_tokens"},
      {"MAX-TOKENS", "max_tokens"},
      {"mx_tokens", "max_tokens"},
      {"mxi_tokens", "max_tokens"},
      {"temprature", "temperature"},
      {"temperatur", "temperature"},
      {"tempreature", "temperature"},
      {"Temperature", "temperature"},
      {"tpo_p", "top_p"},
      {"stop_token_id", "stop_token_ids"},
      {"stops", "stop"},
      {"usr", "-"},
      {"users", "user"},
      {"logprob", "logprobs"},
      {"logprbs", "logprobs"},
      {"nn", "-"},
      {"N", "n"},
      {"m", "-"},
      {"", "-"},
      {"metadata", "-"},
      {"stop_sequences_and", "-"},
      {"templates", "-"},
      {"my_own_field", "-"},
  };
  for (const auto& [given, want] : table) EXPECT_EQ(meant(given), want) << given;
  EXPECT_EQ(meant(std::string(100000, 't')), "-");
  EXPECT_EQ(meant("max_tokens" + std::string(60, '_')), "max_tokens");
  EXPECT_EQ(meant("\xFFmax_tokens\xC3"), "max_tokens") << "bytes count as letters";
}

}  // namespace
}  // namespace perigee

#include "main/api_keys.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace perigee {
namespace {

using Keys = std::vector<std::string>;

class ApiKeysTest : public testing::Test {
 protected:
  ApiKeysTest() {
    options_.add_list("api-key", "");
    options_.add_switch("require-key", false, "");
    options_.add_switch("ignore-priority", false, "");
  }
  void TearDown() override { ::unsetenv("PERIGEE_API_KEY"); }
  void parse(const Keys& words) { ASSERT_TRUE(options_.parse(words).ok()); }

  Options options_{"test", ""};
};

TEST_F(ApiKeysTest, FlagBeforePerigeesVariableBeforeVllms) {
  EXPECT_EQ(*api_keys(options_, nullptr), Keys{});
  EXPECT_EQ(*api_keys(options_, ""), Keys{});
  testing::internal::CaptureStderr();
  EXPECT_EQ(*api_keys(options_, "theirs"), Keys{"theirs"});
  std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("VLLM_API_KEY is the API key"), std::string::npos) << log;
  EXPECT_EQ(log.find("theirs"), std::string::npos) << log;
  ::setenv("PERIGEE_API_KEY", "ours", 1);
  parse({});
  testing::internal::CaptureStderr();
  EXPECT_EQ(*api_keys(options_, "theirs"), Keys{"ours"});
  log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("VLLM_API_KEY is not used"), std::string::npos) << log;
  parse({"--api-key", "a", "b"});
  EXPECT_EQ(*api_keys(options_, "theirs"), (Keys{"a", "b"}));
}

TEST_F(ApiKeysTest, NoKeyWhereOneIsRequiredIsAnError) {
  parse({"--require-key"});
  ASSERT_FALSE(api_keys(options_, nullptr).ok());
  EXPECT_FALSE(api_keys(options_, "").ok());
  EXPECT_EQ(api_keys(options_, nullptr).error().field, "require-key");
  EXPECT_TRUE(api_keys(options_, "theirs").ok());
  parse({"--require-key", "--api-key", ""});
  EXPECT_EQ(api_keys(options_, "theirs").error().field, "api-key");
}

TEST_F(ApiKeysTest, PriorityIsIgnoredWithSeveralKeysUnlessSaidOtherwise) {
  EXPECT_FALSE(ignores_priority(options_, 0));
  EXPECT_FALSE(ignores_priority(options_, 1));
  EXPECT_TRUE(ignores_priority(options_, 2));
  parse({"--ignore-priority"});
  EXPECT_TRUE(ignores_priority(options_, 0));
  parse({"--no-ignore-priority"});
  EXPECT_FALSE(ignores_priority(options_, 2));
}

}  // namespace
}  // namespace perigee

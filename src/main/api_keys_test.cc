#include "main/api_keys.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace perigee {
namespace {

using Keys = std::vector<std::string>;

class ApiKeysTest : public testing::Test {
 protected:
  void TearDown() override { ::unsetenv("PERIGEE_API_KEY"); }
  // What comes of a command line; server_ has the keys.
  Status settle(const Keys& words, const char* vllm_key) {
    CommandLine flags("test", "");
    bool required = false;
    server_ = {};
    add_key_flags(flags, server_, required);
    RETURN_IF_ERROR(flags.parse(words));
    return settle_keys(flags, required, vllm_key, server_);
  }
  Keys keys(const Keys& words, const char* vllm_key) {
    const Status settled = settle(words, vllm_key);
    EXPECT_TRUE(settled.ok());
    return server_.api_keys;
  }
  bool ignores_priority(const Keys& words) {
    EXPECT_TRUE(settle(words, nullptr).ok());
    return server_.ignore_priority;
  }

  ServerConfig server_;
};

TEST_F(ApiKeysTest, FlagBeforePerigeesVariableBeforeVllms) {
  EXPECT_EQ(keys({}, nullptr), Keys{});
  EXPECT_EQ(keys({}, ""), Keys{});
  testing::internal::CaptureStderr();
  EXPECT_EQ(keys({}, "theirs"), Keys{"theirs"});
  std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("VLLM_API_KEY is the API key"), std::string::npos) << log;
  EXPECT_EQ(log.find("theirs"), std::string::npos) << log;
  ::setenv("PERIGEE_API_KEY", "ours", 1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(keys({}, "theirs"), Keys{"ours"});
  log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("VLLM_API_KEY is not used"), std::string::npos) << log;
  EXPECT_EQ(keys({"--api-key", "a", "b"}, "theirs"), (Keys{"a", "b"}));
}

TEST_F(ApiKeysTest, NoKeyWhereOneIsRequiredIsAnError) {
  ASSERT_FALSE(settle({"--require-key"}, nullptr).ok());
  EXPECT_EQ(settle({"--require-key"}, "").error().field, "require-key");
  EXPECT_EQ(keys({"--require-key"}, "theirs"), Keys{"theirs"});
}

TEST_F(ApiKeysTest, AnEmptyKeyOpensNothing) {
  EXPECT_EQ(settle({"--api-key", ""}, "theirs").error().field, "api-key");
  ::setenv("PERIGEE_API_KEY", "", 1);
  EXPECT_EQ(settle({}, "theirs").error().field, "api-key");
}

TEST_F(ApiKeysTest, PriorityIsIgnoredWithSeveralKeysUnlessSaidOtherwise) {
  EXPECT_FALSE(ignores_priority({}));
  EXPECT_FALSE(ignores_priority({"--api-key", "a"}));
  EXPECT_TRUE(ignores_priority({"--api-key", "a", "b"}));
  EXPECT_TRUE(ignores_priority({"--ignore-priority"}));
  EXPECT_FALSE(ignores_priority({"--api-key", "a", "b", "--no-ignore-priority"}));
}

}  // namespace
}  // namespace perigee

#include "main/options.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/temp_folder.h"

namespace perigee {
namespace {

Options make() {
  Options options("perigee test", "a test");
  options.positional("model", "folder");
  options.add("config", "", "file");
  options.add("max-num-seqs", "128", "sequences");
  options.add("kv-cache-memory-bytes", "1G", "bytes");
  options.add_list("served-model-name", "names");
  options.add_switch("enable-prefix-caching", true, "reuse");
  options.add("api-key", "", "secret");
  options.alias("-tp", "max-num-seqs");
  return options;
}

TEST(Options, CommandLineBeatsEnvironmentBeatsFileBeatsDefault) {
  const TempFolder folder;
  const std::string path =
      folder.write("options.yaml", "max-num-seqs: 2\nserved-model-name: [a, b]\nenable-prefix-caching: false\n");
  Options options = make();
  ASSERT_TRUE(options.parse({"--config", path}).ok());
  EXPECT_EQ(options.text("max-num-seqs"), "2");
  EXPECT_EQ(options.list("served-model-name"), (std::vector<std::string>{"a", "b"}));
  EXPECT_FALSE(options.enabled("enable-prefix-caching"));
  ::setenv("PERIGEE_MAX_NUM_SEQS", "3", 1);
  options = make();
  ASSERT_TRUE(options.parse({"--config", path}).ok());
  EXPECT_EQ(options.text("max-num-seqs"), "3");
  options = make();
  ASSERT_TRUE(options.parse({"folder", "-tp", "4", "--config=" + path, "--enable-prefix-caching"}).ok());
  ::unsetenv("PERIGEE_MAX_NUM_SEQS");
  EXPECT_EQ(options.text("max-num-seqs"), "4");
  EXPECT_EQ(options.text("model"), "folder");
  EXPECT_TRUE(options.enabled("enable-prefix-caching"));
}

TEST(Options, UnknownNamesSuggestTheNearest) {
  Options options = make();
  const Status status = options.parse({"--max-num-seq", "4"});
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("\"--max-num-seqs\""), std::string::npos) << status.error().message;
  options = make();
  const Status begun = options.parse({"--kv-cache", "4"});
  ASSERT_FALSE(begun.ok());
  EXPECT_NE(begun.error().message.find("\"--kv-cache-memory-bytes\""), std::string::npos) << begun.error().message;
  options = make();
  const Status far = options.parse({"--mix-nun-bezz", "4"});  // a third of the letters is no near name
  ASSERT_FALSE(far.ok());
  EXPECT_EQ(far.error().message, "unknown flag or word \"--mix-nun-bezz\"; leave it out, or see --help");
  const TempFolder folder;
  const std::string path = folder.write("bad.yaml", "enable-prefix-cachin: true\n");
  options = make();
  const Status from_file = options.parse({"--config", path});
  ASSERT_FALSE(from_file.ok());
  EXPECT_NE(from_file.error().message.find("enable-prefix-caching"), std::string::npos);
}

TEST(Options, OneModelAndAFileThatIsThere) {
  Options options = make();
  const Status two = options.parse({"one", "--max-num-seqs", "4", "two"});
  ASSERT_FALSE(two.ok());
  EXPECT_EQ(two.error().message, "more than one model: one and two");
  for (const auto& words : {std::vector<std::string>{"--model", "one", "--max-num-seqs", "4"},
                            {"--max-num-seqs", "4", "one"},
                            {"--max-num-seqs", "3", "--max-num-seqs=4", "one"},
                            {"one", "-tp", "4"},
                            {"one", "-tp=4"}}) {
    options = make();
    ASSERT_TRUE(options.parse(words).ok());
    EXPECT_EQ(options.text("model"), "one");
    EXPECT_EQ(options.text("max-num-seqs"), "4");
  }
  options = make();
  const Status absent = options.parse({"--config", "/nowhere.yaml"});
  ASSERT_FALSE(absent.ok());
  EXPECT_EQ(absent.error().message, "--config /nowhere.yaml cannot be read");
  const TempFolder folder;
  const std::string path = folder.write("list.yaml", "max-num-seqs: [1, 2]\n");
  options = make();
  const Status list = options.parse({"--config", path});
  ASSERT_FALSE(list.ok());
  EXPECT_EQ(list.error().message, path + ": \"max-num-seqs\" takes one value, not a list");
}

TEST(Options, ASwitchTakesTrueOrFalse) {
  const std::pair<const char*, bool> table[] = {
      {"--enable-prefix-caching", true},        {"--enable-prefix-caching=true", true},
      {"--enable-prefix-caching=false", false}, {"--enable-prefix-caching=0", false},
      {"--no-enable-prefix-caching", false},    {"--no-enable-prefix-caching=off", true},
      {"--no-enable-prefix-caching=on", false}};
  for (const auto& [word, on] : table) {
    Options options = make();
    ASSERT_TRUE(options.parse({"one", word}).ok()) << word;
    EXPECT_EQ(options.enabled("enable-prefix-caching"), on) << word;
  }
  Options options = make();
  const Status maybe = options.parse({"--enable-prefix-caching=maybe"});
  ASSERT_FALSE(maybe.ok());
  EXPECT_EQ(maybe.error().message, "--enable-prefix-caching is a switch: true or false, not \"maybe\"");
}

TEST(Options, AVariableThatMissesANameIsSaid) {
  ::setenv("PERIGEE_MAX_NUM_SEQ", "3", 1);
  ::setenv("PERIGEE_OF_SOMEBODY_ELSE", "3", 1);
  ::setenv("PERIGEE_API_KEY", "secret", 1);
  testing::internal::CaptureStderr();
  Options options = make();
  const Status status = options.parse({"one"});
  const std::string log = testing::internal::GetCapturedStderr();
  for (const char* name : {"PERIGEE_MAX_NUM_SEQ", "PERIGEE_OF_SOMEBODY_ELSE", "PERIGEE_API_KEY"}) ::unsetenv(name);
  EXPECT_TRUE(status.ok());
  EXPECT_NE(log.find("PERIGEE_MAX_NUM_SEQ has no effect; did you mean PERIGEE_MAX_NUM_SEQS?"), std::string::npos)
      << log;
  EXPECT_EQ(log.find("SOMEBODY"), std::string::npos) << log;
  EXPECT_EQ(log.find("API_KEY"), std::string::npos) << log;
}

TEST(Options, NumbersAndSizesAreChecked) {
  Options options = make();
  ASSERT_TRUE(options.parse({"--max-num-seqs", "0", "--kv-cache-memory-bytes", "1.5GiB", "--api-key", "secret"}).ok());
  EXPECT_FALSE(options.integer("max-num-seqs", 1, 10).ok());
  EXPECT_EQ(*options.bytes("kv-cache-memory-bytes"), 3ll << 29);
  EXPECT_EQ(options.resolved().find("secret"), std::string::npos);
}

}  // namespace
}  // namespace perigee

#include "main/command_line.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "base/temp_folder.h"

namespace perigee {
namespace {

using Words = std::vector<std::string>;

enum class Colour { kRed, kBlue };

// One flag of each kind.
struct Fields {
  std::string model;
  int32_t sequences = 128;
  int64_t bytes = 0;
  double share = 0.9;
  std::vector<std::string> names;
  std::vector<std::string> keys;
  std::vector<int64_t> counts = {1, 2};
  bool caching = true;
  Colour colour = Colour::kRed;
};

class CommandLineTest : public testing::Test {
 protected:
  // Of fresh fields.
  Status parse(const Words& words) {
    fields_ = {};
    flags_ = std::make_unique<CommandLine>("perigee test", "a test");
    flags_->add("model,--model", fields_.model, "folder");
    flags_->group("Scheduler");
    flags_->add("--max-num-seqs,--tp", fields_.sequences, Whole{1, 1000}, "sequences");
    flags_->add("--kv-cache-memory-bytes", fields_.bytes, OrAuto{Bytes()}, "bytes");
    flags_->add("--share", fields_.share, Number{0.5, 1}, "share");
    flags_->add("--counts", fields_.counts, Counts(), "counts");
    flags_->add("--colour", fields_.colour, OneOf<Colour>{{{"red", Colour::kRed}, {"blue", Colour::kBlue}}}, "colour");
    flags_->add_list("--served-model-name", fields_.names, "names");
    flags_->add_list("--api-key", fields_.keys, "secret");
    flags_->add_switch("--enable-prefix-caching", fields_.caching, "reuse");
    flags_->add_ignored_switch("--eager", "everything is");
    flags_->add_ignored_value("--parser", "one is enough");
    flags_->add_config_file();
    return flags_->parse(words);
  }
  std::string refusal(const Words& words) {
    const Status status = parse(words);
    return status.ok() ? "" : status.error().message;
  }
  void set(const char* variable, const char* value) {
    ::setenv(variable, value, 1);
    variables_.push_back(variable);
  }
  void TearDown() override {
    for (const char* each : variables_) ::unsetenv(each);
  }

  const TempFolder folder_;
  Fields fields_;
  std::unique_ptr<CommandLine> flags_;
  std::vector<const char*> variables_;
};

TEST_F(CommandLineTest, CommandLineBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string path =
      folder_.write("options.yaml", "max-num-seqs: 2\nserved-model-name: [a, b]\nenable-prefix-caching: false\n");
  ASSERT_TRUE(parse({}).ok());
  EXPECT_EQ(fields_.sequences, 128);
  ASSERT_TRUE(parse({"--config", path}).ok());
  EXPECT_EQ(fields_.sequences, 2);
  EXPECT_EQ(fields_.names, (Words{"a", "b"}));
  EXPECT_FALSE(fields_.caching);
  set("PERIGEE_MAX_NUM_SEQS", "3");
  ASSERT_TRUE(parse({"--config", path}).ok());
  EXPECT_EQ(fields_.sequences, 3);
  ASSERT_TRUE(parse({"folder", "-tp", "4", "--config=" + path, "--enable-prefix-caching"}).ok());
  EXPECT_EQ(fields_.sequences, 4);
  EXPECT_EQ(fields_.model, "folder");
  EXPECT_TRUE(fields_.caching);
}

TEST_F(CommandLineTest, PrintsEveryValueWithItsSourceAndNoSecret) {
  const std::string path = folder_.write("options.yaml", "share: 0.5\ncolour: blue\n");
  set("PERIGEE_ENABLE_PREFIX_CACHING", "off");
  set("PERIGEE_CONFIG", path.c_str());
  ASSERT_TRUE(parse({"one", "--kv-cache-memory-bytes", "1.5GiB", "--max-num-seqs", "3", "--max-num-seqs=4", "--api-key",
                     "secret", "--colour", "red"})
                  .ok());
  EXPECT_EQ(fields_.bytes, 3ll << 29);
  EXPECT_EQ(flags_->resolved(),
            "model: one (command line)\n"
            "max-num-seqs: 4 (command line)\n"
            "kv-cache-memory-bytes: 1.5GiB (command line)\n"
            "share: 0.5 (file)\n"
            "counts: 1,2 (default)\n"
            "colour: red (command line)\n"
            "served-model-name:  (default)\n"
            "api-key: *** (command line)\n"
            "enable-prefix-caching: false (environment)\n"
            "eager:  (default)\n"
            "parser:  (default)\n"
            "config: " +
                path + " (environment)\n");
  EXPECT_EQ(flags_->resolved_given().find("counts"), std::string::npos);
  EXPECT_TRUE(flags_->given("share"));
  EXPECT_FALSE(flags_->given("counts"));
}

TEST_F(CommandLineTest, UnknownNamesSuggestTheNearest) {
  EXPECT_EQ(refusal({"--max-num-seq", "4"}),
            "unknown flag or word \"--max-num-seq\"; did you mean \"--max-num-seqs\"?");
  EXPECT_EQ(refusal({"--max-num-seq=4", "one"}),
            "unknown flag or word \"--max-num-seq=4\"; did you mean \"--max-num-seqs\"?");
  EXPECT_EQ(refusal({"--kv-cache", "4"}),
            "unknown flag or word \"--kv-cache\"; did you mean \"--kv-cache-memory-bytes\"?");
  EXPECT_EQ(refusal({"--max-num-seqs-total", "4"}),
            "unknown flag or word \"--max-num-seqs-total\"; did you mean \"--max-num-seqs\"?");
  EXPECT_EQ(refusal({"--mix-nun-bezz", "4"}), "unknown flag or word \"--mix-nun-bezz\"; leave it out, or see --help");
  const std::string path = folder_.write("bad.yaml", "enable-prefix-cachin: true\n");
  EXPECT_EQ(refusal({"--config", path}),
            path + " has the unknown key \"enable-prefix-cachin\"; did you mean \"enable-prefix-caching\"?");
}

TEST_F(CommandLineTest, OneModelInAnyPlace) {
  EXPECT_EQ(refusal({"one", "--max-num-seqs", "4", "two"}), "more than one model: one and two");
  for (const auto& words : {Words{"--model", "one", "--max-num-seqs", "4"},
                            {"--max-num-seqs", "4", "one"},
                            {"--max-num-seqs", "3", "--max-num-seqs=4", "one"},
                            {"one", "-tp", "4"},
                            {"one", "-tp=4"},
                            {"one", "--tp=4"}}) {
    ASSERT_TRUE(parse(words).ok());
    EXPECT_EQ(fields_.model, "one");
    EXPECT_EQ(fields_.sequences, 4);
  }
}

TEST_F(CommandLineTest, AFileThatCannotBeReadSaysWhy) {
  EXPECT_EQ(refusal({"--config", "/nowhere.yaml"}), "--config /nowhere.yaml cannot be read");
  set("PERIGEE_CONFIG", "/nowhere.yaml");
  EXPECT_EQ(refusal({}), "--config /nowhere.yaml cannot be read");
  const auto told = [&](const char* text, const std::string& why) {
    const std::string path = folder_.write("options.yaml", text);
    EXPECT_EQ(refusal({"--config", path}).substr(0, path.size() + why.size()), path + why);
  };
  told("max-num-seqs: [1, 2]\n", ": \"max-num-seqs\" takes one value, not a list");
  told("- one\n", ": must be a map of flag names to values");
  told("model: {a: b}\n", ": yaml-cpp: error at line 1");
  told("help: true\n", " has the unknown key \"help\"");
  told("config: other.yaml\n", " has the unknown key \"config\"");
  EXPECT_EQ(refusal({"--config", folder_.write("empty.yaml", "")}), "");
}

TEST_F(CommandLineTest, ASwitchTakesTrueOrFalse) {
  const std::pair<const char*, bool> table[] = {
      {"--enable-prefix-caching", true},        {"--enable-prefix-caching=true", true},
      {"--enable-prefix-caching=false", false}, {"--enable-prefix-caching=0", false},
      {"--no-enable-prefix-caching", false},    {"--no-enable-prefix-caching=off", true},
      {"--no-enable-prefix-caching=on", false}};
  for (const auto& [word, on] : table) {
    ASSERT_TRUE(parse({"one", word}).ok()) << word;
    EXPECT_EQ(fields_.caching, on) << word;
  }
  EXPECT_EQ(refusal({"--enable-prefix-caching=maybe"}),
            "--enable-prefix-caching is a switch: true or false, not \"maybe\"");
}

TEST_F(CommandLineTest, AVariableThatMissesANameIsSaid) {
  set("PERIGEE_MAX_NUM_SEQ", "3");
  set("PERIGEE_OF_SOMEBODY_ELSE", "3");
  set("PERIGEE_API_KEY", "secret");
  testing::internal::CaptureStderr();
  const Status status = parse({"one"});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(status.ok());
  EXPECT_NE(log.find("PERIGEE_MAX_NUM_SEQ has no effect; did you mean PERIGEE_MAX_NUM_SEQS?"), std::string::npos)
      << log;
  EXPECT_EQ(log.find("SOMEBODY"), std::string::npos) << log;
  EXPECT_EQ(log.find("API_KEY"), std::string::npos) << log;
}

TEST_F(CommandLineTest, ErrorsNameTheFlagWhatItTakesAndWhereTheValueComesFrom) {
  const std::string range = "--max-num-seqs must be a whole number from 1 to 1000, not ";
  EXPECT_EQ(refusal({"--max-num-seqs", "0"}), range + "\"0\"");
  EXPECT_EQ(refusal({"--max-num-seqs", "1001"}), range + "\"1001\"");
  EXPECT_EQ(refusal({"--max-num-seqs", "0x10"}), range + "\"0x10\"");
  EXPECT_EQ(refusal({"--max-num-seqs", "1e2"}), range + "\"1e2\"");
  EXPECT_EQ(refusal({"--max-num-seqs"}), "--max-num-seqs needs a value (--max-num-seqs VALUE); see --help");
  EXPECT_EQ(refusal({"--share", "nan"}), "--share must be a number from 0.5 to 1, not \"nan\"");
  EXPECT_EQ(refusal({"--kv-cache-memory-bytes", "4GG"}),
            "--kv-cache-memory-bytes must be auto or a size such as 4096, 512M or 4G, not \"4GG\"");
  EXPECT_EQ(refusal({"--colour", "green"}), "--colour must be red or blue, not \"green\"");
  EXPECT_EQ(refusal({"--counts", "1,,2"}), "--counts must be numbers from 1 on with commas between, not \"1,,2\"");
  EXPECT_EQ(parse({"--share", "2"}).error().field, "share");
  const std::string path = folder_.write("options.yaml", "max-num-seqs: many\n");
  EXPECT_EQ(refusal({"--config", path}), range + "\"many\" (from " + path + ")");
  set("PERIGEE_MAX_NUM_SEQS", "-1");
  EXPECT_EQ(refusal({"--config", path}), range + "\"-1\" (from PERIGEE_MAX_NUM_SEQS)");
  set("PERIGEE_MAX_NUM_SEQS", "");
  EXPECT_EQ(refusal({"--config", path}), "PERIGEE_MAX_NUM_SEQS is empty: give it a value, or unset it");
  EXPECT_EQ(refusal({"--max-num-seqs", "1"}), "") << "what is not asked needs no value";
}

TEST_F(CommandLineTest, WhatHasNoEffectIsSaid) {
  ASSERT_TRUE(parse({"one", "--no-eager", "--parser", "kimi"}).ok());
  testing::internal::CaptureStderr();
  flags_->log_ignored();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("--eager has no effect: everything is"), std::string::npos) << log;
  EXPECT_NE(log.find("--parser has no effect: one is enough"), std::string::npos) << log;
}

TEST_F(CommandLineTest, VariablesOfVllmAndNcclAreOneLine) {
  set("VLLM_API_KEY", "secret");
  set("PERIGEE_MAX_NUM_SEQS", "3");
  set("VLLM_TEST_CASE", "1");
  set("NCCL_TEST_CASE", "SYS");
  ASSERT_TRUE(parse({"one"}).ok());
  testing::internal::CaptureStderr();
  flags_->log_ignored();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
  EXPECT_NE(log.find("environment variables without effect: "), std::string::npos) << log;
  for (const char* name : {"VLLM_TEST_CASE", "NCCL_TEST_CASE (NCCL reads it with --comm nccl)"})
    EXPECT_NE(log.find(name), std::string::npos) << log;
  for (const char* other : {"API_KEY", "SYS", "PERIGEE"}) EXPECT_EQ(log.find(other), std::string::npos) << log;
}

TEST_F(CommandLineTest, AKubernetesServiceLinkIsExplained) {
  set("PERIGEE_MAX_NUM_SEQS", "tcp://10.0.0.1:8000");
  EXPECT_EQ(
      refusal({"one"}),
      "--max-num-seqs must be a whole number from 1 to 1000, not \"tcp://10.0.0.1:8000\" (from "
      "PERIGEE_MAX_NUM_SEQS); Kubernetes sets it where a service is called perigee: set enableServiceLinks: false "
      "in the pod");
}

TEST_F(CommandLineTest, HelpHasGroupsSwitchesAndDefaults) {
  const Status help = parse({"--help"});
  ASSERT_FALSE(help.ok());
  EXPECT_EQ(help.error().code, Code::kCancelled);
  for (const char* part : {"Usage: perigee test", "Scheduler:\n", "sequences [128]", "--[no-]enable-prefix-caching",
                           "reuse [true]", "bytes [auto]", "colour [red]"})
    EXPECT_NE(help.error().message.find(part), std::string::npos) << part << " is not in\n" << help.error().message;
}

}  // namespace
}  // namespace perigee

#include "main/engine_flags.h"

#include <gtest/gtest.h>

#include "base/cgroup.h"

namespace perigee {
namespace {

Result<EngineConfig> parsed(std::vector<std::string> words) {
  if (words.empty() || words[0].starts_with("--")) words.insert(words.begin(), "models/tiny-k2");
  EngineFlags read;
  CommandLine flags("test", "");
  add_engine_flags(flags, read);
  RETURN_IF_ERROR(flags.parse(words));
  return settle(flags, std::move(read));
}

TEST(EngineFlags, DefaultsFollowTheDevice) {
  const auto cpu = parsed({"--device", "cpu"}), gpu = parsed({"--device", "cuda"});
  ASSERT_TRUE(cpu.ok() && gpu.ok());
  EXPECT_EQ(cpu->rank.cache_bytes, 1 << 30);
  EXPECT_EQ(cpu->rank.limits.max_sequences, 128);
  EXPECT_EQ(cpu->rank.limits.max_step_tokens, 2048);
  EXPECT_EQ(gpu->rank.cache_bytes, 0);  // what the share leaves
  EXPECT_EQ(gpu->rank.memory_share, 0.9);
  EXPECT_EQ(gpu->rank.limits.max_sequences, 1024);
  EXPECT_EQ(gpu->rank.limits.max_step_tokens, 8192);
}

TEST(EngineFlags, GivenValuesWin) {
  const auto config = parsed({"--device", "cuda", "--kv-cache-memory-bytes", "4G", "--gpu-memory-utilization", "0.5",
                              "--max-num-seqs", "7", "--max-num-batched-tokens", "70"});
  ASSERT_TRUE(config.ok()) << config.error().message;
  EXPECT_EQ(config->rank.cache_bytes, int64_t{4} << 30);
  EXPECT_EQ(config->rank.memory_share, 0.5);
  EXPECT_EQ(config->rank.limits.max_sequences, 7);
  EXPECT_EQ(config->rank.limits.max_step_tokens, 70);
}

TEST(EngineFlags, ALimitThatIsNotGivenGivesWay) {
  const auto many = parsed({"--device", "cpu", "--max-num-seqs", "4096"});
  ASSERT_TRUE(many.ok()) << many.error().message;
  EXPECT_EQ(many->rank.limits.max_step_tokens, 4096);
  const auto small = parsed({"--device", "cuda", "--max-num-batched-tokens", "512"});
  ASSERT_TRUE(small.ok()) << small.error().message;
  EXPECT_EQ(small->rank.limits.max_sequences, 256);
  EXPECT_FALSE(parsed({"--max-num-seqs", "200", "--max-num-batched-tokens", "199"}).ok());
}

TEST(EngineFlags, QuantizationIsForCpus) {
  const char* const int8 = "int8_per_channel_weight_only";
  const auto cpu = parsed({"--device", "cpu", "--quantization", int8});
  ASSERT_TRUE(cpu.ok()) << cpu.error().message;
  EXPECT_EQ(cpu->rank.quantization, OnlineQuantization::kInt8PerChannel);
  for (const char* device : {"cuda", "ref"}) {
    const auto refused = parsed({"--device", device, "-q", int8});
    ASSERT_FALSE(refused.ok()) << device;
    EXPECT_NE(refused.error().message.find("--quantization"), std::string::npos) << refused.error().message;
  }
}

TEST(EngineFlags, ErrorsNameTheFlag) {
  const std::pair<const char*, const char*> cases[] = {
      {"--device", "tpu"},
      {"--gpu-memory-utilization", "1.5"},
      {"--gpu-memory-utilization", "90%"},
      {"--max-num-seqs", "0"},
      {"--max-num-batched-tokens", "many"},
      {"--kv-cache-memory-bytes", "-1"},
      {"--kv-cache-dtype", "int4"},
      {"--speculative-config", "{}"},
      {"--tensor-parallel-size", "65"},
      {"--decode-context-parallel-size", "2"},
      {"--pipeline-parallel-size", "2"},
      {"--data-parallel-size", "2"},
      {"--kv-load-failure-policy", "retry"},
      {"--dtype", "float16"},
      {"--tokenizer", "another"},
      {"--quantization", "int3"},
  };
  for (const auto& [flag, value] : cases) {
    const auto config = parsed({flag, value});
    ASSERT_FALSE(config.ok()) << flag << " " << value;
    EXPECT_NE(config.error().message.find(flag), std::string::npos) << config.error().message;
  }
}

TEST(EngineFlags, ARecipesFlagsAreAcceptedWithAReason) {
  const std::string model = "models/tiny-k2";
  testing::internal::CaptureStderr();
  const auto config =
      parsed({model, "--device", "cpu", "-tp=1", "--trust-remote-code", "--tool-call-parser", "kimi_k2",
              "--enable-auto-tool-choice", "--no-enable-chunked-prefill", "--pipeline-parallel-size", "1", "--dtype",
              "bfloat16", "--gpu-memory-utilization", "0.85", "--tokenizer", model, "--compilation-config", "{}"});
  const std::string log = testing::internal::GetCapturedStderr();
  ASSERT_TRUE(config.ok()) << config.error().message;
  for (const char* said : {"--trust-remote-code has no effect: no code", "--tool-call-parser has no effect: the model",
                           "--enable-chunked-prefill has no effect: prefill is always chunked",
                           "--gpu-memory-utilization has no effect on a CPU"})
    EXPECT_NE(log.find(said), std::string::npos) << log;
  EXPECT_EQ(log.find("--dtype"), std::string::npos) << log;
}

TEST(EngineFlags, WholeExpertsAreTheRanks) {
  for (const bool whole : {false, true}) {
    const auto config = parsed({"--device", "cpu", "-tp", "2", whole ? "--enable-expert-parallel" : "--selfcheck"});
    ASSERT_TRUE(config.ok()) << config.error().message;
    EXPECT_EQ(config->rank.shard().whole_experts, whole);
  }
}

TEST(EngineFlags, AFolderThatIsNotThereIsSaid) {
  const auto config = parsed({"/nowhere/a-model", "--device", "cpu"});
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(
      config.error().message,
      "the model folder /nowhere/a-model does not exist: give a folder on this machine (models are not downloaded)");
  const std::string file = "models/tiny-k2/config.json";
  EXPECT_EQ(check_model_folder(file).error().message,
            "the model is " + file + ", which is a file, expected a folder: give the folder that contains it");
  EXPECT_EQ(check_model_folder("src").error().message,
            "the model folder src has no config.json: give a folder with config.json, weights and tokenizer");
}

TEST(EngineFlags, MoreRanksThanCoresAreWarnedOf) {
  const auto warning = [](const std::string& ranks, const std::string& threads) {
    testing::internal::CaptureStderr();
    EXPECT_TRUE(parsed({"--device", "cpu", "--tensor-parallel-size", ranks, "--threads", threads}).ok());
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warning("1", "1024"), "");
  EXPECT_NE(warning("64", "32").find("64 ranks of 32 threads on "), std::string::npos);
  EXPECT_NE(warning("64", "0").find(available_cores() < 64 ? "64 ranks of 1 thread on " : ""), std::string::npos);
}

TEST(EngineFlags, TensorParallelRanks) {
  for (const char* flag : {"--tensor-parallel-size=4", "--tp=4", "-tp=4"}) {
    const auto config = parsed({"--device", "cpu", flag, "--fail-rank", "3"});
    ASSERT_TRUE(config.ok()) << config.error().message;
    EXPECT_EQ(config->rank.size, 4);
    EXPECT_EQ(config->rank.layout, RankLayout::kTensorParallel);
  }
  EXPECT_EQ(parsed({"--device", "ref", "-tp=2"})->rank.size, 2);
  const auto one = parsed({"--device", "cpu", "-tp=1", "--replicated-ranks", "2"});
  ASSERT_TRUE(one.ok()) << one.error().message;
  EXPECT_EQ(one->rank.layout, RankLayout::kReplicated);
  EXPECT_EQ(parsed({"--device", "cpu", "-tp=2", "--replicated-ranks", "2"}).error().message,
            "--replicated-ranks 2 and --tensor-parallel-size 2: a rank holds all of the model or a share of it; leave "
            "one of the two out");
  EXPECT_EQ(parsed({"--device", "cuda", "-tp=2"})->rank.size, 2);
  EXPECT_EQ(parsed({"--device", "cpu", "-tp=2", "--fail-rank", "2"}).error().field, "fail-rank");
}

TEST(EngineFlags, DecodeContextParallelRanks) {
  for (const char* flag : {"--decode-context-parallel-size=2", "--dcp=2", "-dcp=2"}) {
    const auto config = parsed({"--device", "cpu", "-tp=4", flag});
    ASSERT_TRUE(config.ok()) << config.error().message;
    EXPECT_EQ(config->rank.limits.dcp_size, 2);
    EXPECT_EQ(config->rank.size, 4);
  }
  EXPECT_EQ(parsed({"--device", "cpu", "-tp=4"})->rank.limits.dcp_size, 1);
  const auto three = parsed({"--device", "cpu", "-tp=4", "-dcp=3"});
  ASSERT_FALSE(three.ok());
  EXPECT_EQ(three.error().message,
            "--decode-context-parallel-size 3 does not divide --tensor-parallel-size 4: the ranks of a dcp group are "
            "some of those; use 1, 4 or another divisor");
  EXPECT_TRUE(parsed({"--device", "cpu", "-tp=2", "-dcp=2", "--deterministic"}).ok());
  EXPECT_EQ(parsed({"--device", "cpu", "-dcp=2", "--replicated-ranks", "2"}).error().field,
            "decode-context-parallel-size");
  EXPECT_TRUE(parsed({"--device", "cuda", "-tp=2", "-dcp=2"}).ok());
  EXPECT_EQ(parsed({"--device", "cuda", "-tp=2"})->rank.collectives.carrier, Carrier::kAuto);
  EXPECT_EQ(parsed({"--device", "cuda", "-tp=2", "--comm", "host"})->rank.collectives.carrier, Carrier::kHost);
}

TEST(EngineFlags, RanksAndTheirFaults) {
  const auto plain = parsed({"--device", "cpu"});
  ASSERT_TRUE(plain.ok()) << plain.error().message;
  EXPECT_EQ(plain->rank.size, 1);
  EXPECT_EQ(plain->rank.fault.step, -1) << "never";
  EXPECT_LT(plain->rank_timeouts.behind_s, 4) << "streams of a group with a rank that hangs end within 5 s";
  const auto faulty =
      parsed({"--device", "cpu", "--replicated-ranks", "4", "--fail-rank", "3", "--fail-at-step", "9", "--fail-mode",
              "hang", "--rank-timeout-seconds", "1.5", "--step-timeout-seconds", "7", "--start-timeout-seconds", "90"});
  ASSERT_TRUE(faulty.ok()) << faulty.error().message;
  EXPECT_EQ(faulty->rank.size, 4);
  EXPECT_EQ(faulty->rank.fault.rank, 3);
  EXPECT_EQ(faulty->rank.fault.step, 9);
  EXPECT_EQ(faulty->rank.fault.mode, RankFault::Mode::kHang);
  EXPECT_EQ(faulty->rank_timeouts.behind_s, 1.5);
  EXPECT_EQ(faulty->rank_timeouts.step_s, 7);
  EXPECT_EQ(faulty->rank_timeouts.start_s, 90);
  EXPECT_EQ(parsed({"--device", "cpu", "--fail-rank", "1"}).error().field, "fail-rank") << "there is only rank 0";
  EXPECT_EQ(parsed({"--device", "cpu", "--fail-mode", "sleep"}).error().field, "fail-mode");
  EXPECT_EQ(parsed({"--device", "cuda", "--replicated-ranks", "2"}).error().field, "replicated-ranks");
}

}  // namespace
}  // namespace perigee

#include "main/machine_report.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/cgroup.h"

namespace perigee {
namespace {

MachineReport with_gpus(std::vector<Gpu> gpus) {
  MachineReport report{.cpu = {.model = "a processor", .backend = "cpu-avx2", .cores = 8}, .gpus = std::move(gpus)};
  report.gpu_states.assign(report.gpus.size(), "cool");
  return report;
}

const Gpu kH200{.name = "NVIDIA H200", .bytes = int64_t{139} << 30, .compute_capability = 90};
const Gpu kH100{.name = "NVIDIA H100", .bytes = int64_t{79} << 30, .compute_capability = 90};

TEST(MachineReport, OfThisMachine) {
  const MachineReport report = inspect_machine(32 << 20);
  EXPECT_EQ(report.cpu.cores, available_cores());
  EXPECT_GT(report.cpu.memory_bytes, 0);
  EXPECT_GT(report.cpu.read_gbs, 0);
  EXPECT_EQ(report.cpu.backend.empty(), !report.cpu.why_none.empty());
  EXPECT_EQ(report.gpus.empty(), !report.why_no_gpu.empty());
  EXPECT_EQ(report.gpus.size(), report.gpu_states.size());
}

// What was never written has no memory of its own to read.
TEST(MachineReport, ReadsMemoryThatIsThere) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  inspect_machine(kBytes);
  rusage usage{};
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  EXPECT_GE(usage.ru_maxrss * 1024, kBytes);  // the most that this process ever had
}

TEST(MachineReport, SaysThatThereIsNoGpuAndSoNoLink) {
  MachineReport report = with_gpus({});
  report.why_no_gpu = "no driver";
  const std::string text = report_text(report);
  EXPECT_NE(text.find("none: no driver"), std::string::npos) << text;
  EXPECT_NE(text.find("none: there is no GPU"), std::string::npos) << text;
  EXPECT_TRUE(findings(report).empty()) << "a machine without GPUs is a good one";
}

TEST(MachineReport, NamesWhatIsWrong) {
  EXPECT_TRUE(findings(with_gpus({kH200, kH200})).empty());
  const MachineReport unlike = with_gpus({kH200, kH100});
  ASSERT_EQ(findings(unlike).size(), 1u);
  EXPECT_NE(report_text(unlike).find("WRONG"), std::string::npos);
  EXPECT_NE(report_text(unlike).find("GPU 1: NVIDIA H100"), std::string::npos) << report_text(unlike);
  MachineReport old = with_gpus({kH200});
  old.cpu.backend = "";
  old.cpu.why_none = "no AVX2";
  ASSERT_EQ(findings(old).size(), 1u);
  EXPECT_EQ(report_json(old).find("wrong")->as_array().size(), 1u);
  EXPECT_EQ(report_json(old).find("links")->as_string(), "none: there is one GPU");
}

TEST(MachineReport, LinksAreWhatWasMeasuredOrWhyThereIsNone) {
  MachineReport report = with_gpus({kH200, kH200, kH200});
  const SumRates host{.us = 11.2, .gbs = 20.4};
  report.links = {{.first = 0, .second = 1, .peer = {.us = 2.41, .gbs = 335.2}, .host = host}};
  const std::string near = report_text(report);
  EXPECT_NE(near.find("sums of one token in 2.4 us, of many at 335 GB/s"), std::string::npos) << near;
  EXPECT_NE(near.find("through the host     sums of one token in 11.2 us"), std::string::npos) << near;
  EXPECT_NE(near.find("collectives of 3 GPUs: peer memory"), std::string::npos) << near;
  EXPECT_TRUE(findings(report).empty());
  report.links.push_back({.first = 0, .second = 2, .why_none = "no peer access between them", .host = host});
  const std::string far = report_text(report);
  EXPECT_NE(far.find("3 GPUs: through host memory, because no peer access"), std::string::npos) << far;
  ASSERT_EQ(findings(report).size(), 1u);
  EXPECT_EQ(findings(report)[0], "GPUs 0 and 2 exchange data through host memory: no peer access between them");
  const Json json = report_json(report);
  ASSERT_EQ(json.find("links")->as_array().size(), 2u);
  EXPECT_EQ(json.find("links")->as_array()[0].find("peer")->find("gbs")->as_double(), 335.2);
  EXPECT_EQ(json.find("links")->as_array()[1].find("peer"), nullptr);
  EXPECT_EQ(json.find("links")->as_array()[1].find("host")->find("us")->as_double(), 11.2);
}

}  // namespace
}  // namespace perigee

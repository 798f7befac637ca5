#include "main/machine_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/memory_text.h"
#include "base/thread_pool.h"
#include "comm/cuda/peer_choose.h"
#include "exec/host_device.h"
#include "ops/ops.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  constexpr std::string_view kKey = "model name";
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kKey) && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
  return "unknown";
}

// GB/s of the best of a few passes of all threads over the same memory, which no cache holds.
double read_rate(int num_threads, int64_t bytes) {
  constexpr int kPasses = 4;
  constexpr int64_t kPiece = 1 << 20;  // bytes
  const Buffer memory(static_cast<size_t>(bytes));
  ThreadPool pool(num_threads);
  const int64_t pieces = bytes / kPiece;
  // Pages that were never written all map to one page of zeros, which caches hold.
  pool.run(pieces, [&](int64_t piece, int) { std::memset(memory.data() + piece * kPiece, 0, kPiece); });
  std::vector<uint64_t> sums(static_cast<size_t>(pieces));
  double best_s = 1e300;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double begin_s = system_clock().now_s();
    pool.run(pieces, [&](int64_t piece, int) {
      const auto* from = reinterpret_cast<const uint64_t*>(memory.data() + piece * kPiece);
      sums[static_cast<size_t>(piece)] += std::accumulate(from, from + kPiece / 8, uint64_t{0});
    });
    best_s = std::min(best_s, system_clock().now_s() - begin_s);
  }
  CHECK(std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == 0, "memory of zeros");
  return static_cast<double>(pieces * kPiece) / best_s * 1e-9;
}

std::string line(const std::string& name, const std::string& value) {
  return fmt::format("{:<22} {}\n", name, value);
}

std::string no_links(const MachineReport& report) {
  return report.gpus.empty() ? "none: there is no GPU" : "none: there is one GPU";
}

std::string links_text(const MachineReport& report) {
  if (report.gpus.size() < 2) return line("links between GPUs", no_links(report));
  std::string out, why_not;
  const auto rates = [](const SumRates& sums) {
    return fmt::format("sums of one token in {:.1f} us, of many at {:.0f} GB/s each way", sums.us, sums.gbs);
  };
  for (const PeerLink& link : report.links) {
    out += line(fmt::format("GPU {} - GPU {}", link.first, link.second),
                link.why_none.empty() ? rates(link.peer) : "none: " + link.why_none);
    out += line("  through the host", rates(link.host));
    if (!link.why_none.empty()) why_not = link.why_none;
  }
  return out + line("chosen", peer_choices_text(static_cast<int32_t>(report.gpus.size()), why_not.empty(), why_not));
}

Json links_json(const MachineReport& report) {
  if (report.gpus.size() < 2) return Json(no_links(report));
  Json::Array links;
  const auto rates = [](const SumRates& sums) {
    Json out;
    out.set("us", sums.us);
    out.set("gbs", sums.gbs);
    return out;
  };
  for (const PeerLink& link : report.links) {
    Json one;
    one.set("gpus", Json::Array{Json(link.first), Json(link.second)});
    if (!link.why_none.empty()) one.set("why_none", link.why_none);
    if (link.why_none.empty()) one.set("peer", rates(link.peer));
    one.set("host", rates(link.host));
    links.push_back(std::move(one));
  }
  return Json(std::move(links));
}

}  // namespace

MachineReport inspect_machine(int64_t read_bytes) {
  MachineReport report;
  MachineReport::Cpu& cpu = report.cpu;
  cpu.model = processor_name();
  cpu.cores = available_cores();
  cpu.memory_bytes = host_memory_bytes();
  if (const auto ops = make_cpu_ops({.num_threads = 1}); ops.ok())
    cpu.backend = (*ops)->name();
  else
    cpu.why_none = ops.error().message;
  cpu.read_gbs = read_rate(cpu.cores, std::min(read_bytes, cpu.memory_bytes / 4));
  report.gpus = list_gpus();
  for (size_t i = 0; i < report.gpus.size(); ++i) report.gpu_states.push_back(gpu_report(static_cast<int>(i)));
  if (report.gpus.empty()) report.why_no_gpu = select_device(0).error().message;
  report.links = measure_peer_links(static_cast<int32_t>(report.gpus.size()));
  return report;
}

std::vector<std::string> findings(const MachineReport& report) {
  std::vector<std::string> out;
  if (report.cpu.backend.empty()) out.push_back("no CPU backend: " + report.cpu.why_none);
  if (report.gpus.size() > 1) {
    const Status alike = check_gpus(report.gpus, static_cast<int32_t>(report.gpus.size()));
    if (!alike.ok()) out.push_back(alike.error().message);
  }
  for (const PeerLink& link : report.links)
    if (!link.why_none.empty())
      out.push_back(
          fmt::format("GPUs {} and {} exchange data through host memory: {}", link.first, link.second, link.why_none));
  return out;
}

std::string report_text(const MachineReport& report) {
  const MachineReport::Cpu& cpu = report.cpu;
  std::string out = line("processor", cpu.model);
  out += line("cores", fmt::format("{} that this process may use", cpu.cores));
  out += line("backend", cpu.backend.empty() ? "none: " + cpu.why_none : cpu.backend);
  out += line("memory", fmt::format("{} that this process may have, read at {:.1f} GB/s", memory_text(cpu.memory_bytes),
                                    cpu.read_gbs));
  if (report.gpus.empty()) out += line("GPUs", "none: " + report.why_no_gpu);
  for (size_t i = 0; i < report.gpus.size(); ++i)
    out += line(
        fmt::format("GPU {}", i),
        fmt::format("{}, compute capability {}.{}, {}; {}", report.gpus[i].name, report.gpus[i].compute_capability / 10,
                    report.gpus[i].compute_capability % 10, memory_text(report.gpus[i].bytes), report.gpu_states[i]));
  out += links_text(report);
  for (const std::string& finding : findings(report)) out += line("WRONG", finding);
  return out;
}

Json report_json(const MachineReport& report) {
  Json out, cpu;
  cpu.set("model", report.cpu.model);
  cpu.set("cores", report.cpu.cores);
  cpu.set("backend", report.cpu.backend);
  cpu.set("memory_bytes", report.cpu.memory_bytes);
  cpu.set("read_gbs", report.cpu.read_gbs);
  out.set("cpu", std::move(cpu));
  Json::Array gpus, wrong;
  for (size_t i = 0; i < report.gpus.size(); ++i) {
    Json gpu;
    gpu.set("name", report.gpus[i].name);
    gpu.set("bytes", report.gpus[i].bytes);
    gpu.set("compute_capability", report.gpus[i].compute_capability);
    gpu.set("state", report.gpu_states[i]);
    gpus.push_back(std::move(gpu));
  }
  out.set("gpus", std::move(gpus));
  out.set("links", links_json(report));
  for (const std::string& finding : findings(report)) wrong.emplace_back(finding);
  out.set("wrong", std::move(wrong));
  return out;
}

}  // namespace perigee

#include "tensor/cuda/gpus.h"

#include <fmt/core.h>
#include <strings.h>

#include <algorithm>
#include <charconv>

#include "base/count_text.h"
#include "base/memory_text.h"

namespace perigee {
namespace {

struct GpuModel {
  const char* name;
  double gib;  // that the driver offers: less than is printed on the box
  int compute_capability;
};

// What drivers offer, from out-of-memory reports where one is named; a plan for a machine that is at hand uses what
// that machine says.
constexpr GpuModel kModels[] = {
    {"H100", 79.11, 90},      // 80 GB: vllm-project/vllm issue 27508
    {"H200", 139.0, 90},      // 141 GB: 143,771 MiB in nvidia-smi, less what the others miss
    {"A100", 79.14, 80},      // 80 GB: lianqi1008/Control-GIC issue 6
    {"A100-40GB", 39.0, 80},  // data sheet: 40 GB; less what the 80 GB model shows as missing
    {"L40S", 44.42, 89},      // 48 GB with ECC: stepfun-ai/Step-Video-T2V issue 8
    {"B200", 177.0, 100},     // data sheet: 180 GB, less what the others show as missing
};

std::string list_text(std::span<const Gpu> gpus) {
  std::string text;
  for (size_t i = 0; i < gpus.size(); ++i)
    text += fmt::format("{}GPU {}: {}, {}", i > 0 ? "; " : "", i, gpus[i].name, memory_text(gpus[i].bytes));
  return text;
}

// Memory of one model differs by some pages from one GPU to the next.
bool alike(const Gpu& a, const Gpu& b) {
  const int64_t apart = a.bytes > b.bytes ? a.bytes - b.bytes : b.bytes - a.bytes;
  return a.name == b.name && a.compute_capability == b.compute_capability && apart <= std::max(a.bytes, b.bytes) / 100;
}

}  // namespace

Status check_gpus(std::span<const Gpu> gpus, int32_t num_ranks) {
  const auto needed = static_cast<size_t>(num_ranks);
  if (gpus.size() < needed)
    return Error(
        Code::kUnavailable,
        fmt::format("--tensor-parallel-size {} needs {}, and there {}{}", num_ranks, count_text(num_ranks, "GPU"),
                    gpus.empty()       ? "is none"
                    : gpus.size() == 1 ? "is 1: "
                                       : fmt::format("are {}: ", gpus.size()),
                    list_text(gpus)),
        "tensor-parallel-size");
  const std::span<const Gpu> used = gpus.first(needed);
  if (std::any_of(used.begin(), used.end(), [&](const Gpu& gpu) { return !alike(gpu, used[0]); }))
    return Error(Code::kUnavailable,
                 fmt::format("the ranks of a group need GPUs that are alike, and these are not ({}): choose some by "
                             "CUDA_VISIBLE_DEVICES",
                             list_text(used)),
                 "tensor-parallel-size");
  return {};
}

Result<std::vector<Gpu>> parse_gpus(const std::string& text) {
  int32_t count = 1;
  std::string name = text;
  if (const size_t x = text.find_first_of("xX"); x != std::string::npos) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + x, count);
    if (error == std::errc() && end == text.data() + x) name = text.substr(x + 1);
  }
  constexpr int32_t kMost = 1024;
  std::string known;
  for (const GpuModel& model : kModels) {
    if (strcasecmp(name.c_str(), model.name) == 0 && count >= 1 && count <= kMost)
      return std::vector<Gpu>(static_cast<size_t>(count), {.name = model.name,
                                                           .bytes = static_cast<int64_t>(model.gib * 0x1p30),
                                                           .compute_capability = model.compute_capability});
    known += fmt::format("{}{}", known.empty() ? "" : ", ", model.name);
  }
  return bad_input(fmt::format("--gpus takes a number and a model, such as 4xH200, not \"{}\"; known are {}",
                               text.substr(0, 100), known),
                   "gpus");
}

}  // namespace perigee

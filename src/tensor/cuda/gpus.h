// Gpus: which GPUs a machine has, or is said to have, and whether they can hold the ranks of one group. Plain values:
// no CUDA header, so that it is decided and tested on any machine.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace perigee {

struct Gpu {
  std::string name;            // "NVIDIA H200"
  int64_t bytes = 0;           // of memory, as its driver counts them
  int compute_capability = 0;  // 90
  bool operator==(const Gpu&) const = default;
};

std::vector<Gpu> list_gpus();  // of this machine, in the order of select_device(); empty: none that can be used

// Whether ranks 0 ... num_ranks - 1 can run on GPUs of these numbers: there are so many, and all are alike, as every
// rank gets an equal share. Errors name them.
Status check_gpus(std::span<const Gpu> gpus, int32_t num_ranks);

// "4xH200", "H100": so many GPUs by the name of a model that is known here. Errors list those.
Result<std::vector<Gpu>> parse_gpus(const std::string& text);

}  // namespace perigee

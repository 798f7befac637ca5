// Copies of many units at once, on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace perigee {

// Both 16-byte aligned. No `from`: every byte becomes 0xff.
struct UnitMove {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
};

// moves, digests [count]: device memory. unit_bytes: a multiple of 16. With `digests`, each unit's unit_digest() is
// added to its own.
cudaError_t move_units(const UnitMove* moves, int32_t count, int64_t unit_bytes, uint64_t* digests,
                       cudaStream_t stream);

// On each GPU before ranks run collectives: to load a kernel the driver may wait for those of other GPUs.
cudaError_t load_unit_kernels();

}  // namespace perigee

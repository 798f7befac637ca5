// NcclRank: the collectives of one rank by NCCL. All of them gather, in memory of their own, and add up or pick there:
// so sums are taken in rank order, as PeerComm's kernels take them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "base/result.h"
#include "comm/cuda/nccl_library.h"
#include "tensor/tensor.h"

namespace perigee {

class NcclRank {
 public:
  // Waits for the other ranks of the group `id`. `come_to`: as PeerWords has it.
  static Result<std::unique_ptr<NcclRank>> join(const NcclLibrary& library, const NcclId& id, int32_t rank,
                                                int32_t size, uint64_t* come_to);
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  // As Comm's; `to` in device memory.
  void all_reduce(const Tensor& x, cudaStream_t stream);
  void add_up(const Tensor& x, const Tensor& to, cudaStream_t stream);  // as PeerComm's
  void all_gather(const void* mine, size_t bytes, void* all, cudaStream_t stream);
  void all_to_all(const Tensor& part, const int32_t* to, const Tensor& whole, cudaStream_t stream);
  void barrier(cudaStream_t stream);
  // Any thread: what waits on the GPU ends, and later calls do nothing.
  void abort();

 private:
  NcclRank(const NcclLibrary& library, int32_t rank, int32_t size, uint64_t* come_to);
  void gather(const void* mine, size_t bytes, void* all, cudaStream_t stream);
  // Rows [begin, end) of x from every rank, [size][rows][cols], in memory_.
  void gather_rows(const Tensor& x, int64_t begin, int64_t end, cudaStream_t stream);
  int64_t rows_at_once(const Tensor& x) const;

  const NcclLibrary& library_;
  const int32_t rank_, size_;
  uint64_t* const come_to_;
  Buffer memory_, counter_;
  std::mutex mutex_;      // guards what follows, and is held by each call of NCCL's
  void* comm_ = nullptr;  // none after abort()
};

}  // namespace perigee

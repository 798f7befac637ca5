// PeerComm: a GPU rank's Comm, by our kernels or by NCCL. For code that includes CUDA headers.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <utility>

#include "comm/comm.h"
#include "comm/cuda/nccl_rank.h"
#include "comm/cuda/peer_view.h"

namespace perigee {

class PeerComm final : public Comm {
 public:
  // `aborted` outlives it. With `nccl` there is nothing in the view that kernels could use.
  PeerComm(const PeerView& view, const std::atomic<bool>& aborted, std::unique_ptr<NcclRank> nccl)
      : Comm(view.rank, view.size), view_(view), aborted_(aborted), nccl_(std::move(nccl)) {}

  // Before the first call: all calls enqueue there.
  void set_stream(cudaStream_t stream) { stream_ = stream; }
  // Meanwhile calls enqueue nothing and operands keep what they hold: for warming up, where memory is still reserved,
  // which may wait for GPUs that wait for each other.
  void set_silent(bool silent) { silent_ = silent; }
  bool silent() const { return silent_; }
  // For kernels that exchange data besides; one launch is one call of the group.
  const PeerView& view() const { return view_; }
  // On every rank alike, for tests and measurements: 0 is two-shot always, SIZE_MAX one-shot wherever mailboxes hold
  // it.
  void set_one_shot_bytes(size_t bytes) { view_.one_shot_bytes = bytes; }
  void set_flagged_bytes(size_t bytes) { view_.flagged_bytes = bytes; }

  // Any thread: ends what only NCCL can end.
  void abort() {
    if (nccl_ != nullptr) nccl_->abort();
  }

  void all_reduce(const Tensor& x) override;
  // to += the sum of the ranks' x, which is not rounded: x terms (term.h), `to` f32, of the same sizes.
  void add_up(const Tensor& x, const Tensor& to);
  void all_gather(const void* mine, size_t bytes, void* all) override;
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override;
  void barrier() override;
  Status status() const override;

 private:
  PeerView view_;
  const std::atomic<bool>& aborted_;
  cudaStream_t stream_ = nullptr;
  bool silent_ = false;
  const std::unique_ptr<NcclRank> nccl_;
};

}  // namespace perigee

#include "comm/cuda/peer_comm.h"

#include "base/check.h"
#include "comm/cuda/peer_kernels.h"
#include "tensor/cuda/check.h"

namespace perigee {

void PeerComm::all_reduce(const Tensor& x) {
  CHECK(x.dtype == DType::kF32 || x.dtype == DType::kBF16, "a sum of ", dtype_name(x.dtype));
  if (silent_ || size() == 1 || x.rows * x.cols == 0) return;
  if (nccl_ != nullptr) return nccl_->all_reduce(x, stream_);
  cuda_ok(peer_all_reduce(view_, x, stream_), "all_reduce");
}

void PeerComm::add_up(const Tensor& x, const Tensor& to) {
  CHECK(x.dtype == DType::kF16 && to.dtype == DType::kF32 && x.rows == to.rows && x.cols == to.cols, "terms of ",
        x.rows, "x", x.cols, " as ", dtype_name(x.dtype), " into ", to.rows, "x", to.cols);
  CHECK(size() > 1, "a sum of one rank's terms");
  if (silent_ || x.rows * x.cols == 0) return;
  if (nccl_ != nullptr) return nccl_->add_up(x, to, stream_);
  cuda_ok(peer_add_up(view_, x, to, stream_), "add_up");
}

void PeerComm::all_gather(const void* mine, size_t bytes, void* all) {
  if (silent_ || bytes == 0) return;
  if (nccl_ != nullptr) return nccl_->all_gather(mine, bytes, all, stream_);
  cuda_ok(peer_all_gather(view_, mine, bytes, all, stream_), "all_gather");
}

void PeerComm::all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) {
  CHECK(part.dtype == DType::kF32 && whole.dtype == DType::kF32 && std::ssize(to) == part.rows &&
            whole.cols == size() * part.cols,
        part.rows, "x", part.cols, " into ", whole.rows, "x", whole.cols);
  if (silent_ || part.rows * part.cols == 0) return;
  if (nccl_ != nullptr) return nccl_->all_to_all(part, to.data(), whole, stream_);
  cuda_ok(peer_all_to_all(view_, part, to.data(), whole, stream_), "all_to_all");
}

void PeerComm::barrier() {
  if (silent_ || size() == 1) return;
  if (nccl_ != nullptr) return nccl_->barrier(stream_);
  cuda_ok(peer_barrier(view_, stream_), "barrier");
}

Status PeerComm::status() const {
  if (!aborted_) return {};
  return Error(Code::kDeviceLost, "another rank of the group is lost");
}

}  // namespace perigee

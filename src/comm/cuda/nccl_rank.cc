#include "comm/cuda/nccl_rank.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/cuda/nccl_kernels.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr size_t kMemoryBytes = 32 << 20;

int64_t row_bytes(const Tensor& x) {
  return x.cols * dtype_bytes(x.dtype);
}

}  // namespace

NcclRank::NcclRank(const NcclLibrary& library, int32_t rank, int32_t size, uint64_t* come_to)
    : library_(library),
      rank_(rank),
      size_(size),
      come_to_(come_to),
      memory_(device_buffer(kMemoryBytes)),
      counter_(device_buffer(sizeof(uint64_t))) {
  device_copy(counter_.data(), come_to, sizeof(uint64_t));
}

NcclRank::~NcclRank() {
  if (comm_ != nullptr) library_.destroy(comm_);
}

Result<std::unique_ptr<NcclRank>> NcclRank::join(const NcclLibrary& library, const NcclId& id, int32_t rank,
                                                 int32_t size, uint64_t* come_to) {
  std::unique_ptr<NcclRank> one(new NcclRank(library, rank, size, come_to));
  cuda_ok(load_nccl_kernels(), "loading collectives");
  RETURN_IF_ERROR(device_status());
  if (const int error = library.join(&one->comm_, size, id, rank); error != 0)
    return Error(Code::kUnavailable, std::string("--comm nccl: ") + library.error_text(error), "comm");
  // The first call makes connections.
  one->gather(one->memory_.data() + static_cast<size_t>(rank) * 256, 256, one->memory_.data(), nullptr);
  cuda_ok(cudaStreamSynchronize(nullptr), "joining NCCL");
  RETURN_IF_ERROR(device_status());
  return one;
}

void NcclRank::gather(const void* mine, size_t bytes, void* all, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  if (library_.all_gather(mine, all, bytes, NcclLibrary::kBytes, comm_, stream) != 0)
    cuda_ok(cudaErrorUnknown, "all_gather of NCCL");
}

int64_t NcclRank::rows_at_once(const Tensor& x) const {
  const int64_t rows = static_cast<int64_t>(memory_.size()) / size_ / row_bytes(x);
  CHECK(rows > 0, "rows of ", x.cols, " columns");
  return rows;
}

void NcclRank::gather_rows(const Tensor& x, int64_t begin, int64_t end, cudaStream_t stream) {
  const auto width = static_cast<size_t>(row_bytes(x)), rows = static_cast<size_t>(end - begin);
  uint8_t* const mine = memory_.data() + static_cast<size_t>(rank_) * rows * width;
  const auto stride = static_cast<size_t>(x.row_stride * dtype_bytes(x.dtype));
  const uint8_t* const from = x.row<const uint8_t>(0) + static_cast<size_t>(begin) * stride;
  cuda_ok(cudaMemcpy2DAsync(mine, width, from, stride, width, rows, cudaMemcpyDeviceToDevice, stream), "all_gather");
  gather(mine, rows * width, memory_.data(), stream);
}

void NcclRank::add_up(const Tensor& x, const Tensor& to, cudaStream_t stream) {
  cuda_ok(count_call(reinterpret_cast<uint64_t*>(counter_.data()), come_to_, stream), "add_up");
  const int64_t at_once = rows_at_once(x);
  for (int64_t begin = 0; begin < x.rows; begin += at_once) {
    const int64_t end = std::min(begin + at_once, x.rows);
    gather_rows(x, begin, end, stream);
    cuda_ok(add_gathered(memory_.data(), size_, to.row_range(begin, end - begin), stream), "add_up");
  }
}

void NcclRank::all_reduce(const Tensor& x, cudaStream_t stream) {
  cuda_ok(count_call(reinterpret_cast<uint64_t*>(counter_.data()), come_to_, stream), "all_reduce");
  const int64_t at_once = rows_at_once(x);
  for (int64_t begin = 0; begin < x.rows; begin += at_once) {
    const int64_t end = std::min(begin + at_once, x.rows);
    gather_rows(x, begin, end, stream);
    cuda_ok(sum_gathered(memory_.data(), size_, x.row_range(begin, end - begin), stream), "all_reduce");
  }
}

void NcclRank::all_gather(const void* mine, size_t bytes, void* all, cudaStream_t stream) {
  cuda_ok(count_call(reinterpret_cast<uint64_t*>(counter_.data()), come_to_, stream), "all_gather");
  gather(mine, bytes, all, stream);
}

void NcclRank::all_to_all(const Tensor& part, const int32_t* to, const Tensor& whole, cudaStream_t stream) {
  cuda_ok(count_call(reinterpret_cast<uint64_t*>(counter_.data()), come_to_, stream), "all_to_all");
  const int64_t at_once = rows_at_once(part);
  for (int64_t begin = 0; begin < part.rows; begin += at_once) {
    const int64_t end = std::min(begin + at_once, part.rows);
    gather_rows(part, begin, end, stream);
    cuda_ok(take_dealt(memory_.data(), {.rank = rank_, .size = size_, .begin = begin, .end = end}, to, part.cols, whole,
                       stream),
            "all_to_all");
  }
}

void NcclRank::barrier(cudaStream_t stream) {
  cuda_ok(count_call(reinterpret_cast<uint64_t*>(counter_.data()), come_to_, stream), "barrier");
  gather(memory_.data() + static_cast<size_t>(rank_) * 256, 256, memory_.data(), stream);
}

void NcclRank::abort() {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr) library_.abort(std::exchange(comm_, nullptr));
}

}  // namespace perigee

// Comm: collectives of one rank with the others of its group (DESIGN D12).
//
// Every rank of a group makes the same calls in the same order, with operands of the same sizes. Operands lie in the
// memory of the rank's device. A call enqueues on the rank's stream: work that is enqueued later may use its operands.
// On the CPU it is complete when it returns. Calls come from the rank's thread alone.
//
// Sums are taken in rank order, in f32, whatever the timing: a call has the same bits every time, and on every rank.
//
// A call that waits for a rank that is lost ends when the group aborts. What it leaves in its operands is then
// undefined, here and in all later calls, and status() is kDeviceLost: ask before using a step's results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "base/result.h"
#include "tensor/tensor.h"

namespace perigee {

class Comm {
 public:
  virtual ~Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }

  // x [n, c], f32 or bf16, becomes the sum of the ranks' x.
  virtual void all_reduce(const Tensor& x) = 0;
  // `all` [size][bytes] gets each rank's `mine` [bytes].
  virtual void all_gather(const void* mine, size_t bytes, void* all) = 0;
  // Deals rows of a matrix that the ranks hold by columns. `part` [n, c] is this rank's share of the columns, f32. Row
  // i goes to rank to[i], to none if that is negative. `whole` [rows that come here, size * c] gets them in their
  // order.
  virtual void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) = 0;
  // Returns once every rank has called it.
  virtual void barrier() = 0;
  virtual Status status() const = 0;

  // Of a group of one: sums and barriers do nothing. Any number of ranks may share it.
  static Comm& alone();

 protected:
  Comm(int32_t rank, int32_t size) : rank_(rank), size_(size) {}

 private:
  const int32_t rank_, size_;
};

class LoneComm final : public Comm {
 public:
  LoneComm() : Comm(0, 1) {}
  void all_reduce(const Tensor&) override {}
  void all_gather(const void* mine, size_t bytes, void* all) override {
    std::copy_n(static_cast<const uint8_t*>(mine), bytes, static_cast<uint8_t*>(all));
  }
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override {
    int64_t row = 0;
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i] == 0) std::copy_n(part.row<const float>(static_cast<int64_t>(i)), part.cols, whole.row<float>(row++));
    CHECK(row == whole.rows && part.cols == whole.cols, row, " rows for ", whole.rows);
  }
  void barrier() override {}
  Status status() const override { return {}; }
};

inline Comm& Comm::alone() {
  static LoneComm comm;
  return comm;
}

}  // namespace perigee

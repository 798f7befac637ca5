#include "comm/comm.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace perigee {
namespace {

class LoneComm final : public Comm {
 public:
  LoneComm() : Comm(0, 1) {}
  void all_reduce(const Tensor&) override {}
  void all_gather(const void* mine, size_t bytes, void* all) override { std::memcpy(all, mine, bytes); }
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override {
    int64_t row = 0;
    for (size_t i = 0; i < to.size(); ++i)
      if (to[i] == 0) std::copy_n(part.row<const float>(static_cast<int64_t>(i)), part.cols, whole.row<float>(row++));
    CHECK(row == whole.rows && part.cols == whole.cols, row, " rows for ", whole.rows);
  }
  void barrier() override {}
  Status status() const override { return {}; }
};

}  // namespace

Comm& Comm::alone() {
  static LoneComm comm;
  return comm;
}

}  // namespace perigee

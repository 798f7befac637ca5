#include "exec/observed_comm.h"

#include "ops/observed_ops.h"

namespace perigee {
namespace {

class ObservedComm final : public Comm {
 public:
  ObservedComm(Comm& inner, OpObserver& observer)
      : Comm(inner.rank(), inner.size()), inner_(inner), observer_(observer) {}

  void all_reduce(const Tensor& x) override {
    wait();
    inner_.all_reduce(x);
  }
  void all_gather(const void* mine, size_t bytes, void* all) override {
    wait();
    inner_.all_gather(mine, bytes, all);
  }
  void all_to_all(const Tensor& part, std::span<const int32_t> to, const Tensor& whole) override {
    wait();
    inner_.all_to_all(part, to, whole);
  }
  void barrier() override { inner_.barrier(); }
  Status status() const override { return inner_.status(); }

 private:
  void wait() {
    if (!observer_.wants_waits()) return;
    observer_.begin_wait();
    inner_.barrier();
    observer_.end_wait();
  }

  Comm& inner_;
  OpObserver& observer_;
};

}  // namespace

std::unique_ptr<Comm> observe_comm(Comm& inner, OpObserver& observer) {
  return std::make_unique<ObservedComm>(inner, observer);
}

}  // namespace perigee

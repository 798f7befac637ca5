// ObservedOps: a backend's Ops with an observer beside it, who is told of each op that a model calls: when it begins
// and ends, and, when asked, what it reads and computes. A worker runs its model on this only while one observes.
#pragma once

#include <memory>

#include "ops/op_cost.h"
#include "ops/ops.h"

namespace perigee {

// Called on the worker's thread, in the order of the ops; ops do not nest.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void begin_step() = 0;
  // Whether cost() is wanted before each op. It asks MoE ops for their routing first, which costs time of its own.
  virtual bool wants_costs() const = 0;
  virtual void cost(OpCost&& cost) = 0;
  virtual void begin_op() = 0;
  virtual void end_op() = 0;
  // Device backends, within an op: everything launched since begin_op() or the last launched() was `label`.
  virtual void launched(const char* label) = 0;
  // Whether begin_wait() and end_wait() are wanted around the wait for other ranks, before each collective; it is the
  // same for all ranks of a group.
  virtual bool wants_waits() const { return false; }
  virtual void begin_wait() {}
  virtual void end_wait() {}
};

// `inner` and `observer` must outlive it.
std::unique_ptr<Ops> observe_ops(Ops& inner, OpObserver& observer);

}  // namespace perigee

// StepTable: where a step's time goes, by op and by kernel, beside what each reads and computes. Pure functions over
// what was recorded, so that they can be tested without a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "ops/op_cost.h"
#include "tensor/cuda/activity.h"

namespace perigee {

inline constexpr int32_t kOutsideModel = -1;

// What a launch was for: the step's op, the backend's label of the launch and which use of it within the op.
struct LaunchPlace {
  int32_t op = kOutsideModel;
  std::string_view label;  // of static life
  int32_t use = 0;
};

// A span of a step's time that one thing had to itself. The pieces of a step add up to it.
struct StepPiece {
  LaunchPlace place;
  std::string kernel;  // empty: an op as a whole, or a gap
  double us = 0;
  bool exchange = false;  // a kernel that ends once data of the other ranks has come
};

inline constexpr std::string_view kWaiting = "waiting for other ranks";

struct StepLimits {
  double bytes_per_s = 0, flops_per_s = 0;       // 0: unknown
  double us(int64_t bytes, double flops) const;  // the least time; 0 when unknown
};

struct StepRow {
  std::string what, kernels;  // empty `what`: the op as a whole
  int64_t calls = 0;          // of the op, or launches
  double us = 0;
  int64_t bytes = 0;
  double flops = 0;
};

struct StepGroup {
  std::string op;
  StepRow total;
  std::vector<StepRow> parts;  // of device backends, in the order of their first launch
};

struct StepTable {
  std::vector<StepGroup> groups;  // in the order of their first op; what is outside of ops last
  double sum_us() const;
};

// Groups by op, summed over layers.
StepTable make_step_table(const std::vector<OpCost>& ops, const std::vector<StepPiece>& pieces);
std::string print_step_table(const StepTable& table, const StepLimits& limits);
Json step_table_json(const StepTable& table, const StepLimits& limits);

// The activities of one stream in the order of their beginning, cut after the copies to the host, one or a few in
// succession, with which a rank's step ends. What follows the last is dropped.
std::vector<std::vector<DeviceActivity>> split_steps(const std::vector<DeviceActivity>& activities);

// Who had the time from begin_ns (the end of the step before) to the last end: where activities overlap, as dependent
// launches do, the one that began first, since the others wait for it; where there are none, a gap. `example` is the
// same step launched outside of a graph, places[i] that of example[i]; an activity has the place of its counterpart.
std::vector<StepPiece> place_step(const std::vector<DeviceActivity>& step, int64_t begin_ns,
                                  const std::vector<DeviceActivity>& example, const std::vector<LaunchPlace>& places);

// Of one step of all ranks: cuts from each exchange the time until the last rank had come to it, as a piece of its own.
// An exchange ends on all ranks together, so whoever came last was in it the shortest time, whatever the GPUs' clocks
// say. Does nothing where ranks differ in exchanges.
void split_waits(std::vector<std::vector<StepPiece>>& ranks);

// "void perigee::(anonymous namespace)::skinny_kernel<...>(...)", mangled or not -> "skinny_kernel".
std::string short_kernel_name(const std::string& name);

}  // namespace perigee

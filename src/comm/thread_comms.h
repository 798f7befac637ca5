// ThreadComms: the Comms of CPU ranks that are threads of one process.
//
// Ranks meet: each shows what it has and waits until all others have come. Little data is shown as a copy, which stays
// until the next meeting but one, so that one meeting is all that a call takes. More data is shown where it lies, and
// the ranks meet again when all have read it. The sum of large operands is divided: each rank adds up some of the rows
// and reads the others' sums.
//
// A rank that waits spins, then sleeps, and reads the abort word each time that nobody has come for kPatience. Nothing
// is allocated by a call.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "comm/comm.h"

namespace perigee {

class ThreadComms {
 public:
  // Also for how long a rank that has left a call no longer writes what another one may still read.
  static constexpr std::chrono::milliseconds kPatience{50};
  static constexpr size_t kCopiedBytes = 64 << 10;  // of an operand, at most

  // `abort` outlives it. `first_epoch`: tests begin where the count of meetings wraps around.
  ThreadComms(int32_t size, const std::atomic<bool>& abort, uint32_t first_epoch = 0);
  ~ThreadComms();

  Comm& of(int32_t rank);
  // Any thread: how many meetings the rank has come to. All ranks come to the same ones.
  int64_t num_meetings(int32_t rank) const;

 private:
  struct Place;
  class Member;
  const std::atomic<bool>& abort_;
  std::vector<std::unique_ptr<Place>> places_;
  std::vector<std::unique_ptr<Member>> members_;
};

// The Comms of tensor-parallel ranks that share their caches in groups: ranks [g * dcp_size, (g + 1) * dcp_size), which
// hold consecutive heads, are dcp group g, and rank r has dcp index r % dcp_size in it. Requires that dcp_size divides
// the number of ranks.
class ShardComms {
 public:
  // `abort` outlives it.
  ShardComms(int32_t size, int32_t dcp_size, const std::atomic<bool>& abort);

  Comm& of(int32_t rank) { return all_.of(rank); }
  Comm& dcp_of(int32_t rank);  // of a group of one: alone()
  // Any thread: as ThreadComms's, the meetings of its dcp group among them.
  int64_t num_meetings(int32_t rank) const;

 private:
  ThreadComms all_;
  const int32_t dcp_size_;
  std::vector<std::unique_ptr<ThreadComms>> groups_;  // none of groups of one
};

}  // namespace perigee

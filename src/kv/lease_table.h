// LeaseTable: the side of a transfer that gives. Which prefixes other nodes may read, until when, and their bytes.
//
// A lease begins when its request ends, or when it starts and then grows. It is over when its reader releases it, when
// nobody has extended it for its lifetime, when its request fails before it is whole, or when the table is closed. Its
// pages go back to the scheduler (`on_free`) once no read is under way, so no read sees what came later. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/thread.h"
#include "kv/counts.h"
#include "kv/page_store.h"

namespace perigee {

// How far a lease is, and so what may be read of it: its first num_blocks blocks; of a whole one also the states after
// the full ones and after num_tokens; of one that was withdrawn nothing. Never kFailed: such a lease is over.
struct LeaseHold {
  int32_t num_blocks = 0;
  LeaseStage stage = LeaseStage::kGrows;
  int32_t num_tokens = 0;       // that a whole one has; its last block is a tail's if it is not full
  bool has_checkpoint = false;  // a whole one of a recurrent model
  bool operator==(const LeaseHold&) const = default;
};

class LeaseTable {
 public:
  // `incarnation`: of this process, never used before. `on_free` may be called from any thread.
  LeaseTable(PageStore store, CacheShape shape, uint64_t incarnation, double lifetime_s, const Clock& clock,
             std::function<void(SequenceId)> on_free);

  const CacheShape& shape() const { return shape_; }
  const PageStore& store() const { return store_; }
  double lifetime_s() const { return lifetime_s_; }
  uint64_t incarnation() const { return incarnation_; }

  using Tokens = std::shared_ptr<const std::vector<int32_t>>;
  LeaseName grant(std::shared_ptr<const Lease> lease, Tokens tokens);  // a whole one
  LeaseName grant(LeaseGrowth growth, Tokens tokens);                  // one that grows
  void grow(const LeaseGrowth& growth);                                // nothing happens to one that is over
  // Ends those that nobody has extended in time. To be called about once a second.
  void expire();
  // Ends all, waits for reads that are under way, and refuses everything after that.
  void close();

  // --- For peers. kNotFound: the lease is over, or was never given. ---
  // Whether the lease holds the first num_blocks full blocks of these tokens: a reader says which tokens it wants, and
  // gets no other's. They go on to the end of a tail that it wants; from then on the lease has one for it if they are
  // all that the lease is to hold. kBadInput: other tokens in the blocks.
  Result<LeaseHold> open(const LeaseName& name, std::span<const int32_t> tokens, int32_t num_blocks);
  // The bytes of its units: unit_bytes() of the group for each. kBadInput: units that it does not have. kNotFound also
  // for a lease that was withdrawn: extend() says which.
  Status read(const LeaseName& name, UnitRange units, std::span<uint8_t> out);
  // The same for who copies them in its own way: take(store, pages), while the pages are held.
  using Take = std::function<Status(const PageStore& store, const UnitPages& pages)>;
  Status read(const LeaseName& name, UnitRange units, const Take& take);
  // A lifetime from now on.
  Result<LeaseHold> extend(const LeaseName& name);
  // Waits until leases of the table have grown or ended since it returned `known`, or for so long. kUnavailable:
  // closed.
  Result<uint64_t> await_growth(uint64_t known, double wait_s);
  void release(const LeaseName& name);

  LeaseCounts counts() const;

 private:
  struct Entry {
    LeaseGrowth growth;
    Tokens tokens;
    bool tail_fits = false;  // its reader
    double end_s = 0;
    int32_t num_readers = 0;
    bool over = false;
    bool free = false;  // its pages are the scheduler's again, though a reader may still ask for it
    LeaseHold hold() const;
  };
  using Entries = std::map<int64_t, Entry>;

  Result<Entries::iterator> find(const LeaseName& name);
  void end(Entries::iterator entry, std::vector<SequenceId>& freed);
  static void let_go(Entry& entry, std::vector<SequenceId>& freed);
  void free(const std::vector<SequenceId>& freed) const;

  const PageStore store_;
  const CacheShape shape_;
  const uint64_t incarnation_;
  const double lifetime_s_;
  const Clock& clock_;
  const std::function<void(SequenceId)> on_free_;

  mutable std::mutex mutex_;
  WaitCondition read_, grown_;
  uint64_t growth_ = 0;  // how often a lease has grown or ended
  Entries entries_;
  bool closed_ = false;
  LeaseCounts counts_;
};

}  // namespace perigee

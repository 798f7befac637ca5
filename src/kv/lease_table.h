// LeaseTable: the side of a transfer that gives. Which prefixes other nodes may read, until when, and their bytes.
//
// A lease begins when its request ends and is over when its reader releases it, when nobody has extended it for its
// lifetime, or when the table is closed. Its pages go back to the scheduler (`on_free`) once no read is under way, so
// no read sees what came later. Thread-safe.
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

class LeaseTable {
 public:
  // `incarnation`: of this process, never used before. `on_free` may be called from any thread.
  LeaseTable(PageStore store, CacheShape shape, uint64_t incarnation, double lifetime_s, const Clock& clock,
             std::function<void(SequenceId)> on_free);

  const CacheShape& shape() const { return shape_; }
  const PageStore& store() const { return store_; }
  double lifetime_s() const { return lifetime_s_; }
  uint64_t incarnation() const { return incarnation_; }

  LeaseName grant(std::shared_ptr<const Lease> lease, std::shared_ptr<const std::vector<int32_t>> tokens);
  // Ends those that nobody has extended in time. To be called about once a second.
  void expire();
  // Ends all, waits for reads that are under way, and refuses everything after that.
  void close();

  // --- For peers. kNotFound: the lease is over, or was never given. ---
  // Whether the lease holds the first num_blocks blocks of exactly these tokens: a reader says which tokens it wants,
  // and gets no other's. kBadInput: it does not.
  Status open(const LeaseName& name, std::span<const int32_t> tokens, int32_t num_blocks);
  // The bytes of its units: unit_bytes() of the group for each. kBadInput: units that it has not.
  Status read(const LeaseName& name, UnitRange units, std::span<uint8_t> out);
  // The same for who copies them in its own way: take(store, pages), while the pages are held.
  using Take = std::function<Status(const PageStore& store, const UnitPages& pages)>;
  Status read(const LeaseName& name, UnitRange units, const Take& take);
  // A lifetime from now on.
  Status extend(const LeaseName& name);
  void release(const LeaseName& name);

  LeaseCounts counts() const;

 private:
  struct Entry {
    std::shared_ptr<const Lease> lease;
    std::shared_ptr<const std::vector<int32_t>> tokens;
    double end_s = 0;
    int32_t num_readers = 0;
    bool over = false;
  };
  using Entries = std::map<int64_t, Entry>;

  Result<Entries::iterator> find(const LeaseName& name);
  void end(Entries::iterator entry, std::vector<SequenceId>& freed);
  void free(const std::vector<SequenceId>& freed) const;

  const PageStore store_;
  const CacheShape shape_;
  const uint64_t incarnation_;
  const double lifetime_s_;
  const Clock& clock_;
  const std::function<void(SequenceId)> on_free_;

  mutable std::mutex mutex_;
  WaitCondition read_;
  Entries entries_;
  bool closed_ = false;
  LeaseCounts counts_;
};

}  // namespace perigee

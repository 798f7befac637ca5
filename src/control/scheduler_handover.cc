// Sequences whose prompt another node has computed: from Waiting to Awaiting, and back with a prefix in the cache.

#include <algorithm>
#include <limits>
#include <utility>

#include "control/scheduler_impl.h"

namespace perigee {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kPatienceS = 0.5;

}  // namespace

// False: pages are short. Else it awaits its import, or it needs none, or there could never be room for one: then an
// empty import says so, and it is like any other waiting sequence.
bool Scheduler::Impl::begin_import(Sequence& sequence) {
  const bool alone =
      running_.empty() && plans_.empty() && handovers_.num_imports() == 0 && handovers_.num_leases() == 0;
  Admission::ImportRoom room = admission_.find_import_room(sequence, running_, alone);
  if (room.waits && handovers_.drop_tails()) room = admission_.find_import_room(sequence, running_, alone);
  if (room.waits) return false;
  sequence.request.remote_blocks = 0;
  if (room.num_blocks == 0) {
    imports_.push_back({.sequence = sequence.id()});
    return true;
  }
  PrefixNode chain;
  std::vector<PageHandle> cached = admission_.take(room, chain);
  imports_.push_back(handovers_.begin(sequence, std::move(cached), chain, room));
  sequence.state = Awaiting();
  awaiting_.push_back(&sequence);
  return true;
}

void Scheduler::Impl::end_import(SequenceId id, ImportEnd end, const std::string& why) {
  const auto found = sequences_.find(id);
  Sequence* sequence = found == sequences_.end() ? nullptr : found->second.get();
  const bool arrived = has_arrived(end);
  const std::optional<int32_t> num_blocks = handovers_.end(id, sequence, end);
  CHECK(num_blocks, "sequence ", id, " ends an import that it has not");
  ++totals_.imports;
  if (arrived) totals_.imported_blocks += *num_blocks;
  if (!arrived) ++totals_.failed_imports;
  if (sequence == nullptr) return;  // ended meanwhile
  awaiting_.erase(std::find(awaiting_.begin(), awaiting_.end(), sequence));
  sequence->state = Waiting();
  insert_in_order(waiting_, *sequence);
  if (end != ImportEnd::kFail) return;
  SequenceUpdate& update = add_update(*sequence);
  update.error = why;
  this->end(*sequence, FinishReason::kError, update);
}

// Where pages are leased. Only other nodes can go on if nothing runs here and no import is under way: what waits needs
// pages that they read. But they may wait in the same way, for pages that sequences in this queue keep leased there. So
// the last of these lets its lease go, and computes its prompt when its turn comes; then the next one, for as long as
// nothing moves.
void Scheduler::Impl::give_way(double now_s) {
  if (!running_.empty() || !plans_.empty() || handovers_.num_imports() > 0) {
    standing_since_s_ = kNever;
    return;
  }
  standing_since_s_ = std::min(standing_since_s_, now_s);
  if (now_s - standing_since_s_ < kPatienceS) return;
  const auto last = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                 [](const Sequence* sequence) { return sequence->request.remote_blocks > 0; });
  if (last == waiting_.rend()) return;
  (*last)->request.remote_blocks = 0;
  imports_.push_back({.sequence = (*last)->id()});
  ++totals_.leases_given_back;
  standing_since_s_ = now_s;
}

}  // namespace perigee

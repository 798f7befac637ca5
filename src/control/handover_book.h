// HandoverBook: the pages that leases, imports and tails hold.
//
// A lease keeps confirmed blocks and a checkpoint from being given out; it is let go by its reader, or when its time is
// over (src/kv), whatever becomes of its sequence. An import's pages are written by a transfer that control cannot
// stop: whatever becomes of the sequence, they rest here until the transfer has ended (INV-14, docs/invariants.md). A
// tail that has arrived is in no index: it waits here for its sequence to start, or for its pages to be needed
// elsewhere.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/admission.h"
#include "control/handover.h"
#include "control/prefix_cache.h"
#include "control/scheduler_rules.h"

namespace perigee {

class HandoverBook {
 public:
  HandoverBook(const SchedulerRules& rules, PrefixCache& cache) : rules_(rules), cache_(cache) {}

  // Whether a lease of the sequence is to have a tail. Then the state after all tokens of the prompt but one must be
  // there when the sequence ends, so its chunks end before that one, and nothing is computed after it.
  bool gives_tail(const Sequence& sequence) const {
    return sequence.request.lease != LeaseWish::kNone && sequence.max_outputs == 1 &&
           !sequence.wants_prompt_logprobs() && rules_.handover_tokens(sequence.num_prompt()) % kBlockTokens != 0;
  }

  // All of the sequence's prompt but one token if it leaves a tail, else the longest prefix that another node could
  // start from; held until release(). Null: none.
  std::shared_ptr<const Lease> lease(const Sequence& sequence);
  void release(SequenceId lease);  // of one that is gone: nothing happens

  // A lease that grows, of a sequence that starts. Nothing happens where the prompt has no block for another node.
  void begin_growth(const Sequence& sequence);
  // By what is confirmed of the sequence since.
  void grow(const Sequence& sequence);
  // Ends the growth of a lease that is not whole. What it has is held until release() all the same.
  void withdraw(SequenceId lease);
  // The sequence is about to end well: its tail makes the lease whole that lacks nothing else.
  void add_tail(const Sequence& sequence);
  // Its sequence has ended; `failed`: by a fault, so that nothing that it has computed may be used.
  void finish_growth(SequenceId lease, bool failed);
  std::vector<LeaseGrowth> take_growth() { return std::exchange(growth_, {}); }

  // Takes pages for what the room lacks, which Admission has found.
  Import begin(const Sequence& sequence, std::vector<PageHandle> cached, const PrefixNode& chain,
               const Admission::ImportRoom& room);
  // The sequence has ended first: nothing of the import will be used.
  void abandon(SequenceId sequence);
  // The transfer writes no more. `sequence` null, or bytes that did not arrive: the pages are free. Else its blocks and
  // its checkpoint are published, and its tail waits. How many blocks were to be filled; nothing: no such import.
  std::optional<int32_t> end(SequenceId id, Sequence* sequence, ImportEnd end);

  // What arrived for one sequence alone: its prompt's last block, which is not full, and the state after it.
  struct Tail {
    PageHandle block;
    std::vector<PageHandle> state;
  };
  bool has_tail(SequenceId sequence) const { return tails_.contains(sequence); }
  Tail take_tail(SequenceId sequence);
  void drop_tail(SequenceId sequence) { tails_.erase(sequence); }
  // Of all sequences that wait: they start from the blocks before. False: there is none.
  bool drop_tails();

  int32_t num_leases() const { return static_cast<int32_t>(leases_.size()); }
  int32_t num_imports() const { return static_cast<int32_t>(imports_.size()); }

  template <typename Visit>
  void for_each_page(Visit&& visit) const {
    for (const auto& [id, lent] : leases_)
      for (const PageHandle& handle : lent.handles) visit(handle.place());
    for (const auto& [id, import] : imports_) {
      for (const PageHandle& handle : import.blocks) visit(handle.place());
      for (const PageHandle& handle : import.checkpoint) visit(handle.place());
      for (const PageHandle& handle : import.tail_state) visit(handle.place());
    }
    for (const auto& [id, tail] : tails_) {
      visit(tail.block.place());
      for (const PageHandle& handle : tail.state) visit(handle.place());
    }
  }

 private:
  struct Lent {
    std::vector<PageHandle> handles;  // in the order in which they should survive
    LeaseGrowth growth = {.stage = LeaseStage::kWhole};
  };
  struct Pages {
    std::vector<PageHandle> blocks;  // those that were cached first; a tail's last
    std::vector<PageHandle> checkpoint, tail_state;
    int32_t num_cached = 0;
    bool has_tail = false;
    PrefixNode chain;  // of the last cached one
    bool abandoned = false;
  };
  void publish(const Sequence& sequence, Pages& pages);
  bool add_checkpoint(const Sequence& sequence, Lent& lent, Lease& lease);
  bool leaves_tail(const Sequence& sequence) const;
  void add_tail(const Sequence& sequence, Lent& lent, Lease& lease);
  void report(Lent& lent, LeaseStage stage);

  const SchedulerRules& rules_;
  PrefixCache& cache_;
  std::unordered_map<SequenceId, Lent> leases_;
  std::vector<LeaseGrowth> growth_;  // since it was last taken
  std::unordered_map<SequenceId, Pages> imports_;
  std::unordered_map<SequenceId, Tail> tails_;
};

}  // namespace perigee

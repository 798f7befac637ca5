// Handover: what one node's prefix cache gives to another's (prefill/decode separation, docs/pd.md). Plain values.
//
// It is what a prefix hit starts from: full blocks from the beginning of a prompt and, of a recurrent model, the
// checkpoint at their end. All rules of prefix hits hold for these: who may start there, what a preemption keeps, which
// bits may change. Beside them comes the tail, for one sequence and one start: a last block that is partly filled, and
// the state after it. So all tokens of the prompt are there but the last, which a decode row computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/plan_ids.h"

namespace perigee {

// The side that gives: these pages keep their bytes until Scheduler::release().
struct Lease {
  SequenceId sequence;                     // that computed them; names the lease
  int32_t num_tokens = 0;                  // that its blocks hold; with a tail the last one is not full
  std::vector<Placement> blocks = {};      // by block index, from 0
  std::vector<Placement> checkpoint = {};  // of the state after the full ones; one with a tail may lack it
  std::vector<Placement> tail_state = {};  // after num_tokens; without a tail there is none
  bool operator==(const Lease&) const = default;
};

// Whether a prompt's cache entries are held for another node, and from when on.
enum class LeaseWish : uint8_t {
  kNone,
  kAtEnd,      // of its sequence, if that is kStop or kLength
  kFromStart,  // of its sequence, as they are computed
};

// A lease may begin when its sequence does, and grow while the prompt is computed: by blocks whose results are in, then
// by the checkpoint, and at its sequence's end by the tail. Its sequence runs meanwhile and has all its pages, so
// nobody who reads it waits for whoever waits for pages.
enum class LeaseStage : uint8_t {
  kGrows,
  kWhole,
  // It will never be whole, without a fault: no room, or its request was cancelled or past its deadline. The reader
  // computes the prompt.
  kWithdrawn,
  kFailed,  // a fault has ended its sequence
};
struct LeaseGrowth {
  LeaseStage stage = LeaseStage::kGrows;
  int32_t num_tokens = 0;              // that it has when it is whole
  std::shared_ptr<const Lease> lease;  // what it has now

  int32_t full_blocks() const { return num_tokens / kBlockTokens; }
  bool has_tail() const { return num_tokens % kBlockTokens != 0; }
};

// The side that takes: pages to be filled, which nobody else reads or writes until Scheduler::end_import().
struct Import {
  SequenceId sequence;
  int32_t first_block = 0;                 // the blocks before it are cached here already
  int32_t num_tokens = 0;                  // that there are from the prompt's beginning when it has arrived
  std::vector<Placement> blocks = {};      // first_block and those after it; with a tail the last one is not full
  std::vector<Placement> checkpoint = {};  // where the state after the last full one goes
  std::vector<Placement> tail_state = {};  // and the state after num_tokens
  bool has_tail() const { return num_tokens % kBlockTokens != 0; }
  // Nothing is to be filled: the sequence computes its prompt itself, and end_import() must not be called.
  bool empty() const { return blocks.empty() && checkpoint.empty(); }
  bool operator==(const Import&) const = default;
};

// A lease of one life of one process: neither number is given twice, so that nothing reads what came later.
struct LeaseName {
  uint64_t incarnation = 0;
  int64_t number = 0;
  auto operator<=>(const LeaseName&) const = default;
};

// What the side that takes is told of a lease. It comes by way of clients: the tag shows that a node with the same
// secret gave it (kv/lease_tag.h), and the lease's owner compares the tokens.
struct RemotePrefix {
  std::string peer;  // where it is, as the carrier has it: "host:port"
  LeaseName lease;
  int32_t num_blocks = 0;  // full ones
  std::string tag = {};
  bool operator==(const RemotePrefix&) const = default;
};

enum class ImportEnd : uint8_t {
  kArrived,            // every byte is there and was checked
  kWithoutTail,        // every byte but the tail's, which the other node has not
  kWithoutCheckpoint,  // every byte but the checkpoint's, for which it had no room
  kRecompute,          // it did not arrive: the sequence computes its prompt here
  kFail,               // it did not arrive: the sequence ends with an error
};
constexpr bool has_arrived(ImportEnd end) {
  return end <= ImportEnd::kWithoutCheckpoint;
}

}  // namespace perigee

// PeerComms: the Comms of GPU ranks that are threads of one process. No CUDA header here.
//
// Ranks reach each other's memory (NVLink, or PCIe with peer access), or exchange all data through mailboxes in pinned
// host memory, which every machine can. Then large operands take several calls.
//
// Calls enqueue kernels on the rank's stream (peer_comm.h). Operands lie in device memory, `to` of all_to_all among
// them, and a call allocates nothing and may be captured into a graph. `whole` of all_to_all may have more rows than
// come. Operands have the same sizes, row strides and alignment (to 16 bytes) on every rank; that is not checked.
#pragma once

#include <cstdint>
#include <memory>

#include "base/result.h"
#include "comm/collective_options.h"
#include "comm/comm.h"

namespace perigee {

class PeerComms {
 public:
  // dcp groups: as ShardComms has them (thread_comms.h). `first_epoch`: tests begin where counts wrap around.
  PeerComms(int32_t size, int32_t dcp_size, const CollectiveOptions& options = {}, uint64_t first_epoch = 0);
  ~PeerComms();  // after the GPUs are done with all calls

  struct Pair {
    Comm* all;
    Comm* dcp;  // of a group of one: Comm::alone()
  };
  // By the rank's thread, its GPU selected, once. Waits until all have come, lets its GPU reach theirs, and reserves
  // what it shows to the others. The first rank logs what carries the data, and why. kUnavailable: where kPeer was
  // asked for, names two GPUs that cannot reach each other; kDeviceLost: aborted.
  // Several ranks may share a GPU, in tests: there nothing may load a kernel (as cuBLASLt does at its first calls) once
  // collectives run, because loading waits for all that the GPU runs.
  Result<Pair> connect(int32_t rank);
  // Any thread: what waits on a GPU ends soon, and status() of every Comm is kDeviceLost from now on.
  void abort();
  // Any thread: how many collectives the rank's GPU has come to, those of its dcp group among them.
  int64_t num_meetings(int32_t rank) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace perigee

// A call of a group as its kernels see it: its epoch, messages and flags between blocks of the same number.
//
// Every wait reads the abort word now and then and gives up once it is set; what a kernel then computes is void, and it
// must not use addresses that did not come.
#pragma once

#include <cstdint>

#include "comm/cuda/peer_view.h"

namespace perigee {

// --- Memory that other GPUs write: loads and stores at system scope, which pass L1 by. ---

__device__ __forceinline__ uint32_t load_peer32(const void* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_peer64(const void* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void load_peer128(const void* from, uint64_t (&to)[2]) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(from) : "memory");
}
__device__ __forceinline__ void store_peer32(void* to, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_peer64(void* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void store_peer128(void* to, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

__device__ __forceinline__ void fence_peers() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// --- A call ---

class PeerCall {
 public:
  // Waits for the kernels before this one. By all threads.
  __device__ __forceinline__ explicit PeerCall(const PeerView& the_view) : view(the_view) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // On a shared GPU the next kernel's blocks, which wait for this one, could take the place of a peer's.
    if (!view.one_gpu) asm volatile("griddepcontrol.launch_dependents;");
#endif
    uint64_t counter;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(counter) : "l"(view.counter) : "memory");
    epoch_ = (counter >> kEpochShift) + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_peer64(view.come_to, epoch_);
  }

  // At the end, by all threads of each block.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    // The sum over the blocks is one epoch, and less than that until the last one has come here.
    const uint64_t share = blockIdx.x == 0 ? (uint64_t{1} << kEpochShift) - (gridDim.x - 1) : 1;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(view.counter), "l"(share) : "memory");
  }

  // Never what memory began with, and never what the previous calls of the same parity wrote.
  __device__ __forceinline__ uint32_t flag() const {
    const auto low = static_cast<uint32_t>(epoch_);
    return low == 0 ? 1 : low;
  }
  __device__ __forceinline__ int parity() const {
    return static_cast<int>(epoch_ & 1);
  }
  __device__ __forceinline__ PeerMemory& own() const {
    return *view.memory[view.rank];
  }
  // Where rank `from` writes for rank `to`.
  __device__ __forceinline__ char* mailbox(int to, int from) const {
    return boxes_of(to) + box_number(from) * view.mailbox_bytes;
  }
  // The same for numbers. A call may use either kind.
  __device__ __forceinline__ char* number_box(int to, int from) const {
    return boxes_of(to) + (2 * view.size * view.mailbox_bytes + box_number(from) * view.number_box_bytes);
  }

  // Until ready(). False: aborted.
  template <typename Ready>
  __device__ __forceinline__ bool wait(const Ready& ready) const {
    for (uint32_t polls = 1; !ready(); ++polls)
      if (polls % 256 == 0 && load_peer32(view.abort) != 0) return false;
    return true;
  }

  // Until came(r) is true of what load(r) loads, for each other rank; nothing that has come is loaded again. All are
  // loaded before one is looked at: else each load would wait for the one before. False: aborted.
  template <int kRanks, typename Load, typename Came>
  __device__ __forceinline__ bool poll_others(const Load& load, const Came& came) const {
    bool missing[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) missing[r] = r < view.size && r != view.rank;
    return wait([&] {
      bool any = false;
#pragma unroll
      for (int r = 0; r < kRanks; ++r)
        if (missing[r]) load(r);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        missing[r] = missing[r] && !came(r);
        any |= missing[r];
      }
      return !any;
    });
  }

  // Tells the blocks of this number addresses, once all that earlier kernels wrote is visible to them, and learns
  // theirs. Block-wide. False: aborted.
  template <int kCount>
  __device__ __forceinline__ bool exchange_addresses(void* const (&mine)[kCount],
                                                     char* (&theirs)[kCount][kMostPeers]) const {
    static_assert(kCount <= kMostAddresses);
    bool came = true;
    const int other = threadIdx.x;
    if (other < view.size)
      for (int i = 0; i < kCount; ++i) theirs[i][other] = static_cast<char*>(mine[i]);
    if (other < view.size && other != view.rank) {
      const uint64_t high = uint64_t{flag()} << 32;
      fence_peers();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint64_t bits = reinterpret_cast<uint64_t>(mine[i]);
        store_peer128(view.memory[other]->messages[parity()][blockIdx.x][view.rank][i], (bits & 0xFFFFFFFFu) | high,
                      bits >> 32 | high);
      }
      uint64_t messages[kCount][2] = {};
      came = wait([&] {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          load_peer128(own().messages[parity()][blockIdx.x][other][i], messages[i]);
          all &= messages[i][0] >> 32 == flag() && messages[i][1] >> 32 == flag();
        }
        return all;
      });
      fence_peers();
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        theirs[i][other] = reinterpret_cast<char*>(messages[i][1] << 32 | (messages[i][0] & 0xFFFFFFFFu));
    }
    return __syncthreads_and(came);
  }
  __device__ __forceinline__ bool exchange_addresses(void* mine, char* (&theirs)[1][kMostPeers]) const {
    void* const one[] = {mine};
    return exchange_addresses(one, theirs);
  }

  // Shows the blocks of this number that this rank has come, and waits for theirs; nothing else becomes visible by it.
  __device__ __forceinline__ void greet() const {
    const int other = threadIdx.x;
    if (other < view.size && other != view.rank)
      store_peer32(&view.memory[other]->flags[parity()][blockIdx.x][view.rank], flag());
  }
  __device__ __forceinline__ bool await_greetings() const {
    const int other = threadIdx.x;
    if (other >= view.size || other == view.rank) return true;
    return wait([&] { return load_peer32(&own().flags[parity()][blockIdx.x][other]) == flag(); });
  }

  // All that this block wrote into the others' memory becomes visible to their blocks of this number, and the other way
  // round. Block-wide. False: aborted.
  __device__ __forceinline__ bool meet() const {
    __syncthreads();
    bool came = true;
    if (threadIdx.x < view.size) {
      fence_peers();
      greet();
      came = await_greetings();
      fence_peers();
    }
    return __syncthreads_and(came);
  }

  const PeerView& view;

 private:
  __device__ __forceinline__ char* boxes_of(int rank) const {
    return reinterpret_cast<char*>(view.memory[rank] + 1);
  }
  __device__ __forceinline__ uint32_t box_number(int from) const {
    return static_cast<uint32_t>(parity() * view.size + from);
  }

  uint64_t epoch_;
};

}  // namespace perigee

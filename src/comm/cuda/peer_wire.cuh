// What kernels of collectives are made of: the epoch of a call, data that carries its flag, messages and flags between
// blocks of the same number, sums in rank order.
//
// Every wait reads the abort word now and then and gives up once it is set; what a kernel then computes is void, and it
// must not use addresses that did not come.
#pragma once

#include <cuda_bf16.h>

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
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(counter) : "l"(&own().counter) : "memory");
    epoch_ = (counter >> kEpochShift) + 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) store_peer64(view.come_to, epoch_);
  }

  // At the end, by all threads of each block.
  __device__ __forceinline__ void end() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    // The sum over the blocks is one epoch, and less than that until the last one has come here.
    const uint64_t share = blockIdx.x == 0 ? (uint64_t{1} << kEpochShift) - (gridDim.x - 1) : 1;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&own().counter), "l"(share) : "memory");
  }

  // Never what memory began with, and never what the previous calls of the same parity wrote.
  __device__ __forceinline__ uint32_t flag() const {
    const auto low = static_cast<uint32_t>(epoch_);
    return low == 0 ? 1 : low;
  }
  __device__ __forceinline__ int parity() const { return static_cast<int>(epoch_ & 1); }
  __device__ __forceinline__ PeerMemory& own() const { return *view.memory[view.rank]; }
  // Where rank `from` writes for rank `to`.
  __device__ __forceinline__ char* mailbox(int to, int from) const {
    char* boxes = reinterpret_cast<char*>(view.memory[to] + 1);
    return boxes + static_cast<size_t>(parity() * view.size + from) * kMailboxBytes;
  }

  // Until ready(). False: aborted.
  template <typename Ready>
  __device__ __forceinline__ bool wait(const Ready& ready) const {
    for (uint32_t polls = 1; !ready(); ++polls)
      if (polls % 256 == 0 && load_peer32(view.abort) != 0) return false;
    return true;
  }

  // Tells the blocks of this number an address, once all that earlier kernels wrote is visible to them, and learns
  // theirs. Block-wide. False: aborted.
  __device__ __forceinline__ bool exchange_addresses(void* mine, char* (&theirs)[kMostPeers]) const {
    bool came = true;
    const int other = threadIdx.x;
    if (other < view.size) {
      if (other != view.rank) {
        const uint64_t bits = reinterpret_cast<uint64_t>(mine), high = uint64_t{flag()} << 32;
        __threadfence_system();
        store_peer128(view.memory[other]->messages[parity()][blockIdx.x][view.rank], (bits & 0xFFFFFFFFu) | high,
                      bits >> 32 | high);
        uint64_t message[2] = {};
        came = wait([&] {
          load_peer128(own().messages[parity()][blockIdx.x][other], message);
          return message[0] >> 32 == flag() && message[1] >> 32 == flag();
        });
        __threadfence_system();
        theirs[other] = reinterpret_cast<char*>(message[1] << 32 | (message[0] & 0xFFFFFFFFu));
      } else {
        theirs[other] = static_cast<char*>(mine);
      }
    }
    return __syncthreads_and(came);
  }

  // All that this block wrote into the others' memory becomes visible to their blocks of this number, and the other way
  // round. Block-wide. False: aborted.
  __device__ __forceinline__ bool meet() const {
    __syncthreads();
    bool came = true;
    const int other = threadIdx.x;
    if (other < view.size && other != view.rank) {
      __threadfence_system();
      store_peer32(&view.memory[other]->flags[parity()][blockIdx.x][view.rank], flag());
      came = wait([&] { return load_peer32(&own().flags[parity()][blockIdx.x][other]) == flag(); });
      __threadfence_system();
    }
    return __syncthreads_and(came);
  }

  const PeerView& view;

 private:
  uint64_t epoch_;
};

// --- Pieces of kBytes: 16, 4, 2 or 1 ---

constexpr int piece_words(int bytes) {
  return bytes == 16 ? 4 : 1;
}
// In a mailbox, where each word has a flag.
constexpr int piece_box_bytes(int bytes) {
  return 8 * piece_words(bytes);
}

// Of this GPU or another one, written by an earlier kernel or before a meeting.
template <int kBytes>
__device__ __forceinline__ void load_piece(const void* from, uint32_t (&words)[piece_words(kBytes)]) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
  } else if constexpr (kBytes == 4) {
    words[0] = load_peer32(from);
  } else if constexpr (kBytes == 2) {
    words[0] = *static_cast<const volatile uint16_t*>(from);
  } else {
    words[0] = *static_cast<const volatile uint8_t*>(from);
  }
}

template <int kBytes>
__device__ __forceinline__ void store_piece(void* to, const uint32_t (&words)[piece_words(kBytes)]) {
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(to) = words[0];
  } else if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
  } else {
    *static_cast<uint8_t*>(to) = static_cast<uint8_t>(words[0]);
  }
}

// Into a mailbox, each word with the flag.
template <int kWords>
__device__ __forceinline__ void post(char* box, const uint32_t (&words)[kWords], uint32_t flag) {
  const uint64_t high = uint64_t{flag} << 32;
  if constexpr (kWords == 4) {
    store_peer128(box, words[0] | high, words[1] | high);
    store_peer128(box + 16, words[2] | high, words[3] | high);
  } else {
    store_peer64(box, words[0] | high);
  }
}

// One look at what may have come. False: not all of it.
template <int kWords>
__device__ __forceinline__ bool fetch(const char* box, uint32_t (&words)[kWords], uint32_t flag) {
  if constexpr (kWords == 4) {
    uint64_t low[2], high[2];
    load_peer128(box, low);
    load_peer128(box + 16, high);
    words[0] = static_cast<uint32_t>(low[0]);
    words[1] = static_cast<uint32_t>(low[1]);
    words[2] = static_cast<uint32_t>(high[0]);
    words[3] = static_cast<uint32_t>(high[1]);
    return low[0] >> 32 == flag && low[1] >> 32 == flag && high[0] >> 32 == flag && high[1] >> 32 == flag;
  } else {
    const uint64_t word = load_peer64(box);
    words[0] = static_cast<uint32_t>(word);
    return word >> 32 == flag;
  }
}

// The others' pieces at an offset of their mailboxes here, all polled together. `pieces` of this rank is left as it is.
template <int kWords, int kRanks>
__device__ __forceinline__ bool take_all(const PeerCall& call, size_t offset, uint32_t (&pieces)[kRanks][kWords]) {
  return call.wait([&] {
    bool all = true;
#pragma unroll
    for (int r = 0; r < kRanks; ++r)
      if (r < call.view.size && r != call.view.rank)
        all &= fetch<kWords>(call.mailbox(call.view.rank, r) + offset, pieces[r], call.flag());
    return all;
  });
}

template <int kWords>
__device__ __forceinline__ void post_all(const PeerCall& call, size_t offset, const uint32_t (&words)[kWords]) {
  for (int i = 1; i < call.view.size; ++i) {
    const int other = (call.view.rank + i) % call.view.size;  // not all ranks to the same one at once
    post<kWords>(call.mailbox(other, call.view.rank) + offset, words, call.flag());
  }
}

// --- Sums ---

// total += words, or total = words; of f32, or of pairs of bf16 (of one element the upper half is zero).
template <typename T, int kWords, int kNumbers>
__device__ __forceinline__ void add_words(const uint32_t (&words)[kWords], bool first, float (&total)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    float x;
    if constexpr (sizeof(T) == 4)
      x = __uint_as_float(words[i]);
    else
      x = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
    total[i] = first ? x : total[i] + x;
  }
}

// In rank order, in f32, rounded once.
template <typename T, int kWords, int kRanks>
__device__ __forceinline__ void sum_pieces(const uint32_t (&pieces)[kRanks][kWords], int ranks, uint32_t (&sum)[kWords]) {
  constexpr int kNumbers = kWords * 4 / static_cast<int>(sizeof(T));
  float total[kNumbers];
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < ranks) add_words<T>(pieces[r], r == 0, total);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      sum[i] = __float_as_uint(total[i]);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(total[2 * i], total[2 * i + 1]);
      sum[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
}

}  // namespace perigee

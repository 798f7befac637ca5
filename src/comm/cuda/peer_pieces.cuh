// What collectives move and add up: pieces of operands, in memory and in mailboxes, where each word has its flag beside
// it.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "comm/cuda/peer_wire.cuh"
#include "comm/cuda/term.h"

namespace perigee {

// --- Pieces of kBytes: 16, 8, 4, 2 or 1 ---

constexpr int piece_words(int bytes) {
  return bytes < 8 ? 1 : bytes / 4;
}

// Pieces in a mailbox, where each word has a flag. Pieces of 16 bytes are there in groups of a warp's 32, first the
// halves with their words 0 and 1, then those with 2 and 3: so a warp writes 512 bytes at a time.
template <int kWords>
__host__ __device__ __forceinline__ constexpr size_t box_offset(size_t piece) {
  return kWords == 4 ? piece / 32 * 1024 + piece % 32 * 16 : 8 * kWords * piece;
}
constexpr size_t kBoxHalf = 512;
// Of so many pieces.
template <int kWords>
constexpr size_t box_bytes(size_t pieces) {
  return kWords == 4 ? (pieces + 31) / 32 * 1024 : 8 * kWords * pieces;
}

// Of this GPU or another one, written by an earlier kernel or before a meeting.
template <int kBytes>
__device__ __forceinline__ void load_piece(const void* from, uint32_t (&words)[piece_words(kBytes)]) {
  if constexpr (kBytes == 16) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
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
    store_peer128(box + kBoxHalf, words[2] | high, words[3] | high);
  } else if constexpr (kWords == 2) {
    store_peer128(box, words[0] | high, words[1] | high);
  } else {
    store_peer64(box, words[0] | high);
  }
}

// What may have come, each word with its flag.
template <int kWords>
__device__ __forceinline__ void load_flagged(const char* box, uint64_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    words[0] = load_peer64(box);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      uint64_t both[2];
      load_peer128(box + i / 2 * kBoxHalf, both);
      words[i] = both[0], words[i + 1] = both[1];
    }
  }
}

// visit(i, rank) for each other rank, the i-th after this one: not all write to the same one at once.
template <int kRanks, typename Visit>
__device__ __forceinline__ void for_others(const PeerView& view, const Visit& visit) {
#pragma unroll
  for (int i = 1; i < kRanks; ++i) {
    const int other = view.rank + i;
    if (i < view.size) visit(i, other < view.size ? other : other - view.size);
  }
}

// The others' pieces of that number, all polled together. `pieces` of this rank is left as it is.
template <int kWords, int kRanks>
__device__ __forceinline__ bool take_all(const PeerCall& call, size_t piece, uint32_t (&pieces)[kRanks][kWords]) {
  uint64_t words[kRanks][kWords] = {};
  const bool came = call.poll_others<kRanks>(
      [&](int r) { load_flagged(call.mailbox(call.view.rank, r) + box_offset<kWords>(piece), words[r]); },
      [&](int r) {
        bool all = true;
#pragma unroll
        for (const uint64_t word : words[r]) all &= word >> 32 == call.flag();
        return all;
      });
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (r != call.view.rank) pieces[r][i] = static_cast<uint32_t>(words[r][i]);
  return came;
}

// This rank's among those of all.
template <int kWords, int kRanks>
__device__ __forceinline__ void put_own(const uint32_t (&own)[kWords], int rank, uint32_t (&pieces)[kRanks][kWords]) {
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      if (r == rank) pieces[r][i] = own[i];
}

template <int kRanks, int kWords>
__device__ __forceinline__ void post_all(const PeerCall& call, size_t piece, const uint32_t (&words)[kWords]) {
  for_others<kRanks>(call.view, [&](int, int other) {
    post<kWords>(call.mailbox(other, call.view.rank) + box_offset<kWords>(piece), words, call.flag());
  });
}

// --- Sums ---

// total += words, or total = words; of f32, or of pairs of terms or of bf16 (of one element the upper half is zero).
template <typename T, int kWords, int kNumbers>
__device__ __forceinline__ void add_words(const uint32_t (&words)[kWords], bool first, float (&total)[kNumbers]) {
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    float x;
    if constexpr (sizeof(T) == 4)
      x = __uint_as_float(words[i]);
    else if constexpr (std::is_same_v<T, Term>)
      x = from_term(static_cast<uint16_t>(i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16));
    else
      x = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
    total[i] = first ? x : total[i] + x;
  }
}

// In rank order, in f32.
template <typename T, int kWords, int kRanks, int kCount>
__device__ __forceinline__ void total_of(const uint32_t (&pieces)[kRanks][kWords], int ranks, float (&total)[kCount]) {
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (r < ranks) add_words<T>(pieces[r], r == 0, total);
}

// before + the sum of four terms of each rank.
template <int kRanks>
__device__ __forceinline__ float4 add_terms(const float4& before, const uint32_t (&terms)[kRanks][2], int ranks) {
  float total[4];
  total_of<Term>(terms, ranks, total);
  return {before.x + total[0], before.y + total[1], before.z + total[2], before.w + total[3]};
}

// As total_of, rounded once.
template <typename T, int kWords, int kRanks>
__device__ __forceinline__ void sum_pieces(const uint32_t (&pieces)[kRanks][kWords], int ranks,
                                           uint32_t (&sum)[kWords]) {
  constexpr int kNumbers = kWords * 4 / static_cast<int>(sizeof(T));
  float total[kNumbers];
  total_of<T>(pieces, ranks, total);
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

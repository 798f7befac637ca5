// Boxes of numbers, f32 or pairs of bf16 or f16: a word that has not come is kBlank, so that no flag takes half of the
// bytes.
//
// Who has taken a piece leaves kBlank there. The next writer is two calls away, and so it finds it: a rank that has
// ended a call has heard of every other rank in it, so all of them have ended the call before.
#pragma once

#include "comm/cuda/peer_pieces.cuh"

namespace perigee {

// A NaN, or two of them. Such a word is sent as the one below it, which in each of these formats is NaN as well.
constexpr uint32_t kBlank = 0x01010101u * kBlankByte;

template <int kWords>
__device__ __forceinline__ void put_numbers(char* to, const uint32_t (&words)[kWords]) {
  static_assert(kWords == 4 || kWords == 2);
  if constexpr (kWords == 4)
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  else
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
}
template <int kWords>
__device__ __forceinline__ void clear_numbers(char* at) {
  if constexpr (kWords == 4)
    *reinterpret_cast<uint4*>(at) = {kBlank, kBlank, kBlank, kBlank};
  else
    *reinterpret_cast<uint2*>(at) = {kBlank, kBlank};
}
template <int kWords>
__device__ __forceinline__ void post_numbers(char* to, const uint32_t (&words)[kWords]) {
  uint32_t sent[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) sent[i] = min(words[i], kBlank - 1);
  put_numbers(to, sent);
}

// `at`: bytes in the box.
template <int kRanks, int kWords>
__device__ __forceinline__ void post_numbers_to_all(const PeerCall& call, size_t at, const uint32_t (&words)[kWords]) {
  for_others<kRanks>(call.view,
                     [&](int, int other) { post_numbers(call.number_box(other, call.view.rank) + at, words); });
}

// The others' pieces there, all polled together, once each. `pieces` of this rank is left as it is.
template <int kWords, int kRanks>
__device__ __forceinline__ bool take_numbers(const PeerCall& call, size_t at, uint32_t (&pieces)[kRanks][kWords]) {
  static_assert(kWords == 4 || kWords == 2);
  const bool came = call.poll_others<kRanks>(
      [&](int r) { load_piece<4 * kWords>(call.number_box(call.view.rank, r) + at, pieces[r]); },
      [&](int r) {
        bool all = true;
#pragma unroll
        for (const uint32_t word : pieces[r]) all &= word != kBlank;
        return all;
      });
#pragma unroll
  for (int r = 0; r < kRanks; ++r)
    if (came && r < call.view.size && r != call.view.rank)
      clear_numbers<kWords>(call.number_box(call.view.rank, r) + at);
  return came;
}

// --- Pieces of 16 or 8 bytes in either kind of box; few go with flags (kFlaggedBytes) ---

enum class Box { kFlagged, kNumbers };

template <Box kBox, int kWords>
__device__ __forceinline__ void post_to(const PeerCall& call, int other, size_t piece,
                                        const uint32_t (&words)[kWords]) {
  if constexpr (kBox == Box::kNumbers)
    post_numbers(call.number_box(other, call.view.rank) + 4 * kWords * piece, words);
  else
    post<kWords>(call.mailbox(other, call.view.rank) + box_offset<kWords>(piece), words, call.flag());
}
template <Box kBox, int kRanks, int kWords>
__device__ __forceinline__ void post_to_all(const PeerCall& call, size_t piece, const uint32_t (&words)[kWords]) {
  for_others<kRanks>(call.view, [&](int, int other) { post_to<kBox>(call, other, piece, words); });
}
template <Box kBox, int kRanks, int kWords>
__device__ __forceinline__ bool take_of_all(const PeerCall& call, size_t piece, uint32_t (&pieces)[kRanks][kWords]) {
  if constexpr (kBox == Box::kNumbers)
    return take_numbers(call, 4 * kWords * piece, pieces);
  else
    return take_all(call, piece, pieces);
}

}  // namespace perigee

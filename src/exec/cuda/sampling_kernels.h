// Sampling on the GPU by the rules of control/sampling.h, without a sort (sampling_order.cuh): several blocks a row
// find its maximum and count its ids by distance from it, then one chooses. The sums that decide are integers, so that
// a seed gives the same id whatever order threads add in.
#pragma once

#include <cuda_runtime.h>

#include "exec/cuda/records.h"

namespace perigee {

// A row that verifies drafts is sampled at a place after each of its tokens, as if those before it were certain; so its
// places are worked on at once. It keeps ids up to the first that is not its draft.
struct SampleCall {
  const SampleRecord* samples = nullptr;  // [count], `places` of each row one after the other
  int32_t count = 0, places = 1;
  const float* logits = nullptr;    // [rows][vocab] rows that are whole here
  const float* shares = nullptr;    // [rows][vocab / ranks] this rank's share of each; of several ranks
  const uint32_t* masks = nullptr;  // [mask rows][ceil(vocab / 32)] allowed ids
  float* work = nullptr;            // [ceil(slots / ranks)][places][vocab] scratch
  void* scratch = nullptr;          // sample_scratch_bytes(count)
  SampleResult* results = nullptr;  // [count]
  Pick* picks = nullptr;            // [count] of several ranks or places: what accept_picks() makes results of
  // Of several places:
  RowOutcome* outcomes = nullptr;      // [rows]
  const int32_t* committed = nullptr;  // [rows], see BatchArrays, as the next
  const int32_t* commit = nullptr;
  SyntheticRates synthetic;
};

int64_t sample_scratch_bytes(int64_t rows);
// Samples, makes the ids the slots' newest and counts them. A row with a NaN, +inf or nothing to choose from has
// finite = 0 and id 0. With picks: those for the rows of this rank and of every rank, and no more.
cudaError_t sample_rows(const SampleCall& call, const SlotArrays& slots, cudaStream_t stream);
// With picks: the rest of sample_rows(), from all ranks' picks [ranks][count]. A tie goes to the lowest id. Moves the
// lengths of slots on by the drafts that they keep.
cudaError_t accept_picks(const SampleCall& call, const Pick* all_picks, const SlotArrays& slots, cudaStream_t stream);
// Log-probabilities of records' ids; logits as above.
cudaError_t score_rows(const ScoreRecord* records, int32_t count, const float* logits, int32_t vocab,
                       TokenScore* results, cudaStream_t stream);
// Loads the kernels, which would else happen at their first launch and may need memory then.
cudaError_t load_sampling_kernels();

}  // namespace perigee

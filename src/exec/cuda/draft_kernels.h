// The kernels of drafting on the GPU.
#pragma once

#include <cuda_runtime.h>

#include "exec/cuda/records.h"
#include "exec/ngram_match.h"
#include "tensor/tensor.h"

namespace perigee {

// Drafts by prompt lookup of the batch's first `rows` sequences, of those that were sampled: as draft_from() of
// exec/ngram_drafter.h. As many as there are places beside the first.
cudaError_t look_up_drafts(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, NgramMatch match,
                           cudaStream_t stream);
// What all passes of a draft model read, of the batch's first `rows` sequences, but for the tokens of the later passes.
// The first pass runs the step's rows, also those of drafts that were not kept: what it writes for these into the cache
// is written over by the next first pass. Later ones go as far as the sequence has blocks.
cudaError_t begin_passes(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, const DraftPasses& passes,
                         cudaStream_t stream);
// From the logits of a pass ([rows, this rank's share of the vocabulary] f32) its drafts, which are the next pass's
// tokens; of equal logits the lowest id. Of several ranks: this rank's picks and no more.
cudaError_t guess_drafts(const Tensor& logits, const SlotArrays& slots, const BatchArrays& batch, int32_t pass,
                         const DraftPasses& passes, cudaStream_t stream);
// Of several ranks: the rest, from all ranks' picks.
cudaError_t agree_on_drafts(const SlotArrays& slots, const BatchArrays& batch, int32_t rows, int32_t pass,
                            const DraftPasses& passes, cudaStream_t stream);
// As load_sampling_kernels().
cudaError_t load_draft_kernels();

}  // namespace perigee

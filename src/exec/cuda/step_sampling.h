// StepSampling: what plans ask of their logits, from the penalties of a slot that starts to the rows of a result.
//
// Ranks that share the vocabulary deal rows among themselves as HostSampling does, and each ends with all ids.
//
// Holds the memory for masks, sampling lists, scratch and results. One step after another: ask(), upload_masks() when
// rows are masked, deal(), score() where prompts want it, sample() or its graph, fetch_drafts() when rows are masked
// and there is a drafter, and when the step's event has come, fill(). Two steps may be between sample() and fill(),
// told apart by their buffer, 0 or 1.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "comm/comm.h"
#include "control/plan.h"
#include "exec/batch_builder.h"
#include "exec/cuda/device_arrays.h"
#include "exec/cuda/plan_upload.h"
#include "exec/cuda/sampling_kernels.h"
#include "exec/mask_box.h"
#include "exec/slots.h"

namespace perigee {

struct SamplingSizes {
  int64_t slots = 0, scores = 0, max_positions = 0;
  SyntheticRates synthetic = {};
};

// What one step asks: device records, and what of its results belongs to which row of the plan.
struct AskedLogits {
  std::span<const SampleRecord> samples;  // of each plan row's places; for PlanArrays
  int32_t num_rows = 0;                   // up to the last that samples
  bool masked = false;                    // whether there are masked rows
  std::span<const ScoreRecord> scores;
  std::span<const int32_t> sampled_by;  // of each row of logits that come of no graph: for deal()
  std::vector<int32_t> score_ids;       // of all prompt scores, in the order of the plan's rows
  std::vector<int32_t> num_scores;      // of each plan row
  std::vector<bool> logprobs;           // of each plan row: whether the sampled id's are wanted

  // Nothing yet, in the same memory.
  void begin() {
    num_rows = 0;
    masked = false;
    score_ids.clear();
    num_scores.clear();
    logprobs.clear();
  }
};

class StepSampling {
 public:
  // `comm`, which outlives it, is that of the ranks that `arrays` know.
  StepSampling(const SamplingSizes& sizes, const DeviceArrays& arrays, const Stream& stream, Comm& comm);

  // Bias, stop ids, penalty counts and history of a slot that starts, on their way after what the stream has.
  void start(const SequenceStart& start);
  // Row i of the logits is plan row i's when they come of a graph, else they are those that the builder lists.
  void ask(const StepPlan& plan, const Slots& slots, const BatchBuilder& builder, bool graph, PlanUpload& upload,
           AskedLogits& asked);
  // Waits for the step's masks and uploads those of the rows that this rank samples. Requires the results of every
  // earlier step to be there.
  void upload_masks(const StepPlan& plan, MaskBox& masks);
  // Brings the logits of row i whole to rank sampled_by[i], on the device. Nothing to do for a rank that is alone.
  void deal(const Tensor& logits, std::span<const int32_t> sampled_by);
  // Scores of prompts, on their way to the host.
  void score(const AskedLogits& asked, const Tensor& logits, int32_t buffer);
  // Samples as the records of the batch's first `rows` rows say, results on their way to the host. All addresses are
  // fixed but that of `logits`, so a graph may hold it.
  void sample(int32_t rows, const Tensor& logits, int32_t buffer);
  // The drafts of all slots, on their way to the host: the masks of a constrained row that verifies them follow from
  // them.
  void fetch_drafts(int32_t buffer);
  // Into a result that has begun.
  void fill(const StepPlan& plan, const AskedLogits& asked, int32_t buffer, StepResult& result) const;

 private:
  const SampleResult* samples_of(const Buffer& results) const {
    return reinterpret_cast<const SampleResult*>(results.data());
  }
  const RowOutcome* outcomes_of(const Buffer& results) const {
    return reinterpret_cast<const RowOutcome*>(samples_of(results) + sizes_.slots * batch_.places);
  }
  const TokenScore* scores_of(const Buffer& results) const {
    return reinterpret_cast<const TokenScore*>(outcomes_of(results) + sizes_.slots);
  }
  void fill_ids(size_t row, bool logprobs, int32_t buffer, RowResult& out) const;
  void fill_drafts(SlotId slot, int32_t buffer, RowResult& out) const;
  void fetch(const void* from, size_t bytes, int32_t buffer);
  uint8_t* take_lists(size_t bytes);
  const float* whole(const Tensor& logits) const {
    return comm_.size() == 1 ? static_cast<const float*>(logits.data) : reinterpret_cast<const float*>(whole_.data());
  }

  const SamplingSizes sizes_;
  const SlotArrays slots_;
  const BatchArrays batch_;
  const Stream& stream_;
  Comm& comm_;
  Buffer whole_;              // of several ranks: rows of logits that came here
  Buffer picks_, all_picks_;  // of several ranks or places: Pick [slots][places]; of all ranks
  Buffer work_, scratch_, masks_device_, masks_host_, lists_device_, lists_host_;
  Buffer results_device_;  // SampleResult [slots][places], RowOutcome [slots], TokenScore [scores]
  std::array<Buffer, 2> results_host_;
  std::array<Buffer, 2> drafts_host_;  // as SlotArrays::drafts; empty without speculation
  Event lists_sent_;                   // by the last start
  size_t lists_used_ = 0;              // bytes of lists_host_ that may still be on their way
  std::vector<SampleRecord> samples_;  // of the plan being packed
  std::vector<ScoreRecord> scores_;
  std::vector<int32_t> sampled_by_;
};

}  // namespace perigee

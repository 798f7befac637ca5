// What a step's kernels make of random plans, against the host's slots and batch builder.
#include "exec/cuda/step_kernels.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/rng.h"
#include "base/soak.h"
#include "exec/batch_builder.h"
#include "exec/cuda/device_arrays.h"
#include "exec/cuda/plan_upload.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int32_t kSlots = 5, kMaxBlocks = 12, kWidth = 3, kPages = 120, kMaxTokens = 600;
constexpr int64_t kPageBytes = 20480;

class StillModel : public Model {
 public:
  const ModelInfo& info() const override { return info_; }
  CacheLayout cache_layout(LatentFormat) const override { return {}; }
  ModelOutput forward(const Batch&, Ops&, const PagePool&) const override { return {}; }
  MlaForm choose_form(TokenKind, int64_t, int64_t) const override { return MlaForm::kAbsorbed; }

 private:
  ModelInfo info_;
};

template <typename T>
std::vector<T> fetch(const T* device, size_t count) {
  std::vector<T> out(count);
  device_copy(out.data(), device, count * sizeof(T));
  return out;
}

class StepKernels : public testing::Test {
 protected:
  explicit StepKernels(DcpShare dcp = {}, int32_t places = 1) : dcp_(dcp), places_(places) {}
  void SetUp() override {
    if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
    constexpr int32_t kCheckpoints = max_checkpoint_writes(kSlots, kMaxTokens);
    arrays_ = std::make_unique<DeviceArrays>(ArraySizes{.slots = kSlots,
                                                        .tokens = kMaxTokens,
                                                        .max_blocks = kMaxBlocks,
                                                        .vocab = 100,
                                                        .state_width = kWidth,
                                                        .checkpoints = kCheckpoints,
                                                        .places = places_,
                                                        .shared = dcp_.size > 1,
                                                        .draft_tables = dcp_.keeps_all});
    upload_ = std::make_unique<PlanUpload>(UploadLimits{.max_sequences = kSlots,
                                                        .max_tokens = kMaxTokens,
                                                        .max_blocks = kMaxBlocks,
                                                        .max_logit_rows = kMaxTokens,
                                                        .state_width = kWidth,
                                                        .max_checkpoints = kCheckpoints,
                                                        .places = places_});
    pool_ = device_buffer(kPages * kPageBytes);
    for (size_t i = 0; i < host_pool_.size(); ++i) host_pool_[i] = static_cast<uint8_t>(random_u64(3, i));
    device_copy(pool_.data(), host_pool_.data(), host_pool_.size());
  }

  int32_t pick(int32_t end) { return static_cast<int32_t>(random_u64(9, ++draws_) % static_cast<uint64_t>(end)); }
  // kWidth pages for each index of the dcp group, the rank's own in [first, end).
  std::vector<Placement> some_pages(int32_t first, int32_t end) {
    std::vector<Placement> pages;
    for (int32_t i = 0; i < kWidth; ++i)
      for (int32_t index = 0; index < dcp_.size; ++index)
        pages.push_back({PageId(index == dcp_.index ? first + pick(end - first) : pick(kPages)), index});
    return pages;
  }
  std::vector<int32_t> here(std::span<const Placement> places) const {
    std::vector<int32_t> pages;
    for (const Placement& place : places)
      if (place.dcp_index == dcp_.index) pages.push_back(place.page.value);
    return pages;
  }

  // States of a plan never share pages with others, nor with the checkpoints that they are copied from.
  void start(StepPlan& plan, int32_t slot) {
    SequenceStart start;
    start.slot = SlotId(slot);
    start.sequence = SequenceId(++sequences_);
    start.num_prompt_tokens = 40 + pick(60);
    start.tokens = std::make_shared<std::vector<int32_t>>(start.num_prompt_tokens + pick(40), 5);
    start.num_cached_tokens = pick(2) * 64;
    start.sampling = std::make_shared<SamplingParams>();
    for (int32_t i = 0; i < kWidth; ++i)
      for (int32_t index = 0; index < dcp_.size; ++index)
        start.state_pages.push_back({PageId(slot * kWidth + (i + dcp_.index - index + kWidth) % kWidth), index});
    if (start.num_cached_tokens > 0) start.checkpoint = some_pages(kSlots * kWidth, kPages);
    plan.starts.push_back(start);
    slots_.start(start);
    const std::vector<int32_t> to = here(start.state_pages), from = here(start.checkpoint);
    for (size_t i = 0; i < kWidth; ++i) {
      uint8_t* const page = host_pool_.data() + to[i] * kPageBytes;
      if (from.empty())
        std::memset(page, 0, kPageBytes);
      else
        std::memcpy(page, host_pool_.data() + from[i] * kPageBytes, kPageBytes);
    }
  }

  void append(StepPlan& plan, SlotId slot) {
    plan.appends.push_back({slot, slots_[slot].num_blocks, {PageId(pick(kPages)), pick(dcp_.size)}});
    slots_.append(plan.appends.back());
  }

  void add_row(StepPlan& plan, int32_t slot, bool decode) {
    const Slot& state = slots_[SlotId(slot)];
    const int32_t num_drafts = decode ? pick(places_) : 0, num_tokens = decode ? 1 + num_drafts : 1 + pick(150);
    PlanRow row{.slot = SlotId(slot), .sequence = state.sequence, .position = PositionRange::at(state.length)};
    row.work = Decode();
    if (num_drafts > 0) row.work = Verify{num_drafts};
    const bool starts = std::any_of(plan.starts.begin(), plan.starts.end(),
                                    [&](const SequenceStart& start) { return start.slot == row.slot; });
    if (decode) draft(row.slot, starts);
    if (!decode)
      row.work =
          Prefill{.tokens_offset = static_cast<int32_t>(plan.tokens.size()), .num_tokens = num_tokens, .sample = true};
    for (int32_t i = 0; !decode && i < num_tokens; ++i) plan.tokens.push_back(pick(1000));
    while (state.num_blocks * 64 < state.length + num_tokens) append(plan, row.slot);
    if (state.num_blocks < kMaxBlocks && pick(4) == 0) append(plan, row.slot);  // as where the host knows less
    plan.rows.push_back(row);
    const int32_t commit = state.length + (decode ? 0 : num_tokens);
    const bool commits = decode || state.length < state.num_prompt_tokens;  // also in deterministic mode
    for (int32_t at = (state.committed / 64 + 1) * 64; commits && at <= commit; at += 64)
      if (pick(4) > 0) plan.checkpoints.push_back({row.slot, at - 1, at, some_pages(0, kPages)});
  }

  // As a drafter has left them; now and then fewer than the row has room for.
  void draft(SlotId slot, bool starts) {
    if (places_ == 1) return;
    DraftIds drafts;
    if (starts) drafts.push_back(-1);
    while (drafts.size() < kMaxDrafts) drafts.push_back(drafts.empty() || drafts.back() >= 0 ? pick(400) - 20 : -1);
    for (int32_t& id : drafts) id = std::max(id, -1);
    device_copy(arrays_->slots().drafts + slot.value * kMaxDrafts, drafts.begin(), kMaxDrafts * 4);
    slots_[slot].drafts = drafts;
    for (int32_t& id : slots_[slot].drafts)
      if (id < 0) id = slots_[slot].newest_id;  // that is what runs in its place
  }

  StepPlan make_plan() {
    StepPlan plan;
    for (int32_t slot = 0; slot < kSlots; ++slot)
      if (!slots_[SlotId(slot)].sequence.valid() || slots_[SlotId(slot)].length > 500 || pick(20) == 0)
        start(plan, slot);
    const bool only_decode = pick(3) == 0;
    for (const bool decode : {true, false})
      for (int32_t slot = 0; slot < kSlots; ++slot)
        if ((slot % 2 == 0 || only_decode) == decode && (decode || !only_decode) && pick(6) > 0)
          add_row(plan, slot, decode);
    return plan;
  }

  void run(const StepPlan& plan, const Batch& batch, int32_t padded, int32_t width) {
    upload_->begin();
    PlanArrays packed = pack_plan(plan, batch.sequences, slots_, kWidth, width, *upload_);
    std::vector<SampleRecord> samples;
    for (const PlanRow& row : plan.rows)
      for (int32_t place = 0; place < places_; ++place)
        samples.push_back({.slot = place <= row.num_drafts() ? row.slot.value : -1,
                           .logit_row = row.position.least + place,
                           .mask_row = -1,
                           .rank = 0});
    packed.samples = upload_->place(std::span<const SampleRecord>(samples)).data();
    upload_->send(stream_);
    const SlotArrays& slots = arrays_->slots();
    ASSERT_EQ(apply_deltas(packed, slots, stream_.get()), cudaSuccess);
    ASSERT_EQ(start_states(packed, slots, {pool_.data(), kPageBytes}, stream_.get()), cudaSuccess);
    ASSERT_TRUE(padded == 0 || build_batch(packed, slots, arrays_->batch(), padded, stream_.get()) == cudaSuccess);
    upload_->fence(stream_);
    stream_.synchronize();
  }

  // With a width each sequence has so many rows, of which those beyond its own are stored as far as there are blocks.
  void check_rows(const Batch& want, int32_t width) {
    const BatchArrays& got = arrays_->batch();
    const size_t rows = std::max(want.positions.size(), want.sequences.size() * static_cast<size_t>(width));
    const auto tokens = fetch(got.tokens, rows), positions = fetch(got.positions, rows),
               row_sequence = fetch(got.row_sequence, rows), row_page = fetch(got.row_page, rows);
    for (size_t s = 0; s < want.sequences.size(); ++s) {
      const SequenceRows& sequence = want.sequences[s];
      for (int32_t i = 0; i < std::max(sequence.num_tokens, width); ++i) {
        const auto row = static_cast<size_t>(width > 0 ? static_cast<int32_t>(s) * width : sequence.first_row) + i;
        EXPECT_EQ(row_sequence[row], static_cast<int32_t>(s));
        EXPECT_EQ(positions[row], sequence.position + i);
        const bool own = i < sequence.num_tokens;
        EXPECT_EQ(tokens[row], want.tokens[static_cast<size_t>(sequence.first_row + (own ? i : 0))]);
        const Slot& slot = slots_[SlotId(sequence.slot)];
        const bool has_block = positions[row] / 64 < slot.num_blocks;
        EXPECT_EQ(row_page[row], has_block ? page_here(sequence, positions[row]) : -1);
        if (!dcp_.keeps_all) continue;
        EXPECT_EQ(fetch(got.draft_row_page + row, 1)[0],
                  has_block ? slot.draft_blocks[static_cast<size_t>(positions[row] / 64)] : -1);
      }
    }
  }

  void check_samples(const PlanRow& want, size_t s) {
    for (int32_t place = 0; place < places_; ++place) {
      const SampleRecord got = fetch(arrays_->batch().samples + s * static_cast<size_t>(places_) + place, 1)[0];
      EXPECT_EQ(got.slot, place <= want.num_drafts() ? want.slot.value : -1);
      EXPECT_EQ(got.logit_row, want.position.least + place);
    }
    const bool chunk = want.prefill() != nullptr;
    EXPECT_EQ(fetch(arrays_->slots().length + want.slot.value, 1)[0],
              want.position.least + (chunk ? want.num_tokens() : 1));
  }

  // `want` with as many rows as there are.
  void check_sequence(const SequenceRows& want, size_t s) {
    const BatchArrays& got = arrays_->batch();
    const auto number = [s](const int32_t* array) { return fetch(array + s, 1)[0]; };
    const auto list = [s](const int32_t* array) { return fetch(array + s * kWidth, kWidth); };
    const int32_t length = want.position + want.num_tokens;
    EXPECT_EQ(number(got.first_row), want.first_row);
    EXPECT_EQ(number(got.first_row + 1), want.first_row + want.num_tokens);
    EXPECT_EQ(number(got.lengths), length);
    EXPECT_EQ(number(got.slots), want.slot);
    EXPECT_EQ(number(got.committed), want.committed);
    EXPECT_EQ(number(got.commit), want.commit_all ? length : want.position);
    EXPECT_EQ(list(got.state_pages), std::vector<int32_t>(want.state_pages, want.state_pages + kWidth));
    const int32_t first = number(got.first_checkpoint);
    ASSERT_EQ(number(got.first_checkpoint + 1) - first, std::ssize(want.checkpoints));
    for (size_t i = 0; i < want.checkpoints.size(); ++i) {
      const StateCheckpoint& checkpoint = want.checkpoints[i];
      const size_t at = static_cast<size_t>(first) + i;
      EXPECT_EQ(fetch(got.checkpoint_position + at, 1)[0], checkpoint.position);
      EXPECT_EQ(fetch(got.checkpoint_pages + at * kWidth, kWidth),
                std::vector<int32_t>(checkpoint.pages, checkpoint.pages + kWidth));
    }
    checkpoints_ += std::ssize(want.checkpoints);
    rows_of_several_ += want.checkpoints.size() > 1 ? 1 : 0;
    check_blocks(want, s);
    if (dcp_.keeps_all) check_draft_blocks(want, s);
  }

  // Of a draft's own cache all that there are, as later passes go beyond the length.
  void check_draft_blocks(const SequenceRows& want, size_t s) {
    const Slot& slot = slots_[SlotId(want.slot)];
    std::vector<int32_t> blocks = slot.draft_blocks;
    const auto needed = static_cast<size_t>((want.position + want.num_tokens + 63) / 64);
    blocks.resize(std::min<size_t>(std::max(needed, blocks.size()), kMaxBlocks), blocks[0]);
    EXPECT_EQ(fetch(arrays_->batch().draft_tables + s * kMaxBlocks, blocks.size()), blocks);
  }

  // Padding may go beyond the blocks that there are: it reads one that is full.
  void check_blocks(const SequenceRows& want, size_t s) {
    const BatchArrays& got = arrays_->batch();
    const Slot& slot = slots_[SlotId(fetch(got.slots + s, 1)[0])];
    const int32_t length = want.position + want.num_tokens;
    auto blocks = static_cast<size_t>((tokens_here(want, length) + 63) / 64);
    if (dcp_.size > 1) blocks = std::min(blocks, slot.pages.size());
    std::vector<int32_t> pages(slot.pages.begin(), slot.pages.begin() + std::min<int64_t>(blocks, slot.pages.size()));
    pages.resize(blocks, pages.empty() ? -1 : pages[0]);
    EXPECT_EQ(fetch(got.block_tables + s * kMaxBlocks, blocks), pages);
    if (dcp_.size == 1) return;
    EXPECT_EQ(fetch(got.local_blocks + s, 1)[0], static_cast<int32_t>(blocks));
    const auto index = want.shared.here.begin();
    EXPECT_EQ(fetch(got.block_index + s * kMaxBlocks, blocks),
              std::vector<int32_t>(index, index + static_cast<std::ptrdiff_t>(blocks)));
  }

  void run_random_steps(bool deterministic) {
    BatchBuilder builder(model_, deterministic, dcp_.index);
    for (int step = 0; step < (gpu_sanitizer() ? 10 : 600) && !HasFailure(); ++step) {
      SCOPED_TRACE(step);
      const StepPlan plan = make_plan();
      const Batch& want = builder.build(plan, slots_);
      const auto sequences = static_cast<int32_t>(plan.rows.size());
      const bool may_pad = plan.tokens.empty();
      const int32_t width = may_pad && (places_ == 1 || pick(2) > 0) ? places_ : 0;
      const bool pads = may_pad && (places_ == 1 || width > 0);
      run(plan, want, pads ? kSlots : sequences, width);
      check_rows(want, width);
      for (size_t s = 0; s < plan.rows.size(); ++s) {
        SequenceRows rows = want.sequences[s];
        if (width > 0) rows.first_row = static_cast<int32_t>(s) * width, rows.num_tokens = width;
        check_sequence(rows, s);
        check_samples(plan.rows[s], s);
      }
      for (int32_t s = sequences; pads && s < kSlots; ++s) {
        EXPECT_EQ(fetch(arrays_->batch().lengths + s, 1)[0], 0);
        if (dcp_.size > 1) {
          EXPECT_EQ(fetch(arrays_->batch().local_blocks + s, 1)[0], 0);
        }
        EXPECT_EQ(fetch(arrays_->batch().first_checkpoint + s, 1)[0],
                  fetch(arrays_->batch().first_checkpoint + s + 1, 1)[0]);
        for (int32_t i = 0; i < places_; ++i) {
          EXPECT_EQ(fetch(arrays_->batch().tokens + s * places_ + i, 1)[0], -1);
          EXPECT_EQ(fetch(arrays_->batch().row_page + s * places_ + i, 1)[0], -1);
          if (dcp_.keeps_all) {
            EXPECT_EQ(fetch(arrays_->batch().draft_row_page + s * places_ + i, 1)[0], -1);
          }
          EXPECT_EQ(fetch(arrays_->batch().samples + s * places_ + i, 1)[0].slot, -1);
        }
        EXPECT_EQ(fetch(arrays_->batch().first_row + s + 1, 1)[0], (s + 1) * places_);
      }
      EXPECT_EQ(fetch(pool_.data(), pool_.size()), host_pool_);
      for (size_t i = 0; i < plan.rows.size(); ++i) {
        const SlotId slot = plan.rows[i].slot;
        slots_.advance(slot, plan.rows[i].num_tokens(), want.sequences[i].commit_all);
        if (const int32_t drafts = plan.rows[i].num_drafts(); drafts > 0) {
          slots_.lower(slot, pick(drafts + 1));
          device_copy(arrays_->slots().length + slot.value, &slots_[slot].length, 4);
        }
        slots_.accept(slot, pick(1000));
        device_copy(arrays_->slots().newest + slot.value, &slots_[slot].newest_id, 4);
      }
    }
    if (gpu_sanitizer()) return;
    EXPECT_GT(checkpoints_, 20);
    EXPECT_GT(rows_of_several_, 5);
  }

  const DcpShare dcp_;
  const int32_t places_;
  StillModel model_;
  Slots slots_{kSlots, 0, kMaxBlocks, {}, dcp_};
  std::unique_ptr<DeviceArrays> arrays_;
  std::unique_ptr<PlanUpload> upload_;
  Stream stream_;
  Buffer pool_;
  std::vector<uint8_t> host_pool_ = std::vector<uint8_t>(kPages * kPageBytes);
  int64_t checkpoints_ = 0, rows_of_several_ = 0;
  uint64_t draws_ = 0;
  int64_t sequences_ = 0;
};

TEST_F(StepKernels, SameBatchAsTheHost) {
  run_random_steps(false);
}

// What a preempted sequence had given comes again in chunks, and is not committed.
TEST_F(StepKernels, SameBatchAsTheHostInDeterministicMode) {
  run_random_steps(true);
}

// Ranks that share the blocks of each sequence: the first and the last of a group, the latter with pages of states too.
class StepKernelsOfDcp : public StepKernels, public testing::WithParamInterface<DcpShare> {
 protected:
  StepKernelsOfDcp() : StepKernels(GetParam()) {}
};

TEST_P(StepKernelsOfDcp, SameBatchAsTheHost) {
  run_random_steps(false);
}

INSTANTIATE_TEST_SUITE_P(All, StepKernelsOfDcp, testing::Values(DcpShare{0, 2}, DcpShare{2, 3}));

// Rows that verify drafts, as many as each has, and in graphs all as many as there can be.
class StepKernelsOfDrafts : public StepKernels, public testing::WithParamInterface<DcpShare> {
 protected:
  StepKernelsOfDrafts() : StepKernels(GetParam(), 4) {}
};

TEST_P(StepKernelsOfDrafts, SameBatchAsTheHost) {
  run_random_steps(false);
}

// The last keeps the blocks of all ranks for a draft.
INSTANTIATE_TEST_SUITE_P(All, StepKernelsOfDrafts,
                         testing::Values(DcpShare{0, 1}, DcpShare{1, 2}, DcpShare{1, 3, true}));

// Of one slot: what stood there goes, what stands in others stays.
TEST_F(StepKernels, CountsOfAPlainLoop) {
  constexpr uint32_t kStale = 0xA5A5A5A5;
  SlotArrays slots = arrays_->slots();
  const std::pair<int32_t, int32_t> sizes[] = {{0, 0}, {1, 0}, {0, 1}, {37, 20}, {900, 3000}, {5000, 2}};
  for (const int32_t vocab : {100, 97})
    for (const auto& [num_prompt, num_sampled] : sizes) {
      SCOPED_TRACE(testing::Message() << vocab << " ids, " << num_prompt << " and " << num_sampled << " tokens");
      slots.vocab = vocab;
      const auto count_words = static_cast<size_t>(slots.count_words()),
                 bit_words = static_cast<size_t>(slots.bit_words());
      const auto slot = static_cast<size_t>(pick(kSlots));
      std::vector<uint32_t> counts(kSlots * count_words, kStale), seen(kSlots * bit_words, kStale);
      device_copy(slots.counts, counts.data(), counts.size() * 4);
      device_copy(slots.seen, seen.data(), seen.size() * 4);
      std::fill_n(counts.begin() + static_cast<int64_t>(slot * count_words), count_words, 0);
      std::fill_n(seen.begin() + static_cast<int64_t>(slot * bit_words), bit_words, 0);
      std::vector<int32_t> tokens(static_cast<size_t>(num_prompt + num_sampled));
      for (size_t i = 0; i < tokens.size(); ++i) {
        const auto id = static_cast<uint32_t>(tokens[i] = pick(vocab));
        seen[slot * bit_words + id / 32] |= 1u << (id % 32);
        if (i >= static_cast<size_t>(num_prompt)) counts[slot * count_words + id / 2] += id % 2 == 0 ? 1 : 1u << 16;
      }
      Buffer memory = device_buffer(tokens.size() * 4 + 4);
      device_copy(memory.data(), tokens.data(), tokens.size() * 4);
      ASSERT_EQ(count_tokens(slots, static_cast<int32_t>(slot), reinterpret_cast<const int32_t*>(memory.data()),
                             num_prompt + num_sampled, num_prompt, stream_.get()),
                cudaSuccess);
      stream_.synchronize();
      EXPECT_EQ(fetch(slots.counts, counts.size()), counts);
      EXPECT_EQ(fetch(slots.seen, seen.size()), seen);
    }
}

// A count stops at 65,535 and leaves its neighbour in the word alone.
TEST_F(StepKernels, CountsStopWhenTheyAreFull) {
  constexpr int32_t kPrompt = 3, kSlot = 2;
  std::vector<int32_t> tokens(kPrompt, 9);
  tokens.insert(tokens.end(), 70000, 8);
  tokens.insert(tokens.end(), 5, 9);
  Buffer memory = device_buffer(tokens.size() * 4);
  device_copy(memory.data(), tokens.data(), tokens.size() * 4);
  const SlotArrays& slots = arrays_->slots();
  const auto* there = reinterpret_cast<const int32_t*>(memory.data());
  ASSERT_EQ(count_tokens(slots, kSlot, there, static_cast<int32_t>(tokens.size()), kPrompt, stream_.get()),
            cudaSuccess);
  stream_.synchronize();
  const auto counts = fetch(slots.counts + kSlot * slots.count_words(), static_cast<size_t>(slots.count_words()));
  const auto seen = fetch(slots.seen + kSlot * slots.bit_words(), 1);
  EXPECT_EQ(counts[4], 5u << 16 | 0xFFFFu);
  EXPECT_EQ(counts[3], 0u);
  EXPECT_EQ(counts[5], 0u);
  EXPECT_EQ(seen[0], 3u << 8);
}

}  // namespace
}  // namespace perigee

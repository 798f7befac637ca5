// Sampling on the GPU against exec/sampler.h: the same ids for the same seeds, and the same log-probabilities.
#include "exec/cuda/sampling_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/rng.h"
#include "base/soak.h"
#include "exec/cuda/plan_upload.h"
#include "exec/sampler.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int32_t kVocab = 50002, kRows = 30;  // rows that are aligned to 16 bytes and rows that are not
constexpr int kTogether = 24;                  // the rows from here on have several limits at once

template <typename T>
T* place(Buffer& memory, const std::vector<T>& values) {
  memory = device_buffer(values.size() * sizeof(T));
  device_copy(memory.data(), values.data(), values.size() * sizeof(T));
  return reinterpret_cast<T*>(memory.data());
}

// One row of each kind of request, by number.
SamplingParams params_of(int row) {
  SamplingParams p{.temperature = row % 4 == 0 ? 0.0f : 0.3f + 0.2f * static_cast<float>(row % 5)};
  p.seed = static_cast<uint64_t>(100 + row);
  p.logprobs = row % 3 == 0 ? 5 : -1;
  if (row % 5 == 1) p.top_k = 1 + row;
  if (row % 5 == 2) p.top_p = 0.8f;
  if (row % 7 == 3) p.min_p = 0.05f;
  if (row % 6 == 4) p.logit_bias = {{7, 30.0f}, {8, -5.0f}, {kVocab + 3, 9.0f}};
  if (row % 6 == 5) p.presence_penalty = 0.7f, p.frequency_penalty = 0.2f, p.repetition_penalty = 1.3f;
  if (row >= kTogether) {
    constexpr int kWhich[] = {3, 5, 6, 7, 7, 7};  // 1 top_k, 2 top_p, 4 min_p: each of them binds
    const int which = kWhich[row - kTogether];
    p.temperature = 0.8f + 0.1f * static_cast<float>(row - kTogether);
    p.top_k = which & 1 ? 40 + 3000 * (row - kTogether) : 0;
    p.top_p = which & 2 ? 0.6f : 1.0f;
    p.min_p = which & 4 ? 0.2f : 0.0f;
  }
  p.stop_ids = {1, 2};
  p.min_tokens = row % 2 == 0 && row % 12 != 8 ? 10 : 0;  // of those rows the largest logit decides
  return p;
}

std::vector<uint32_t> mask_of(int row, int place = 0) {
  std::vector<uint32_t> words((kVocab + 31) / 32);
  const auto seed = static_cast<uint64_t>(77 + place);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(random_u64(seed, 100 * row + i));
  return words;
}

bool is_masked(int row) {
  return row % 8 == 6;
}

class Sampling : public testing::Test {
 protected:
  void SetUp() override {
    if (const Status gpu = select_device(0); !gpu.ok()) GTEST_SKIP() << gpu.error().message;
    slots_.vocab = kVocab;
    std::vector<int32_t> ids(kRows * kMaxListed);
    std::vector<float> bias(kRows * kMaxListed);
    std::vector<SlotParams> params;
    std::vector<uint32_t> masks;
    for (int row = 0; row < kRows; ++row) {
      const SamplingParams p = params_of(row);
      params.push_back(slot_params(p));
      size_t at = static_cast<size_t>(row) * kMaxListed;
      for (const auto& [id, value] : p.logit_bias) {
        ids[at] = id;
        bias[at++] = value;
      }
      for (const int32_t id : p.stop_ids) ids[at++] = id;
      SampleRecord sample{.slot = row, .logit_row = row, .mask_row = -1};
      if (is_masked(row)) {
        sample.mask_row = num_masks_++;
        const auto words = mask_of(row);
        masks.insert(masks.end(), words.begin(), words.end());
      }
      samples_.push_back(sample);
      // Spread over a few bins, over more than there are, and all in one.
      const float spread = row % 11 == 3 ? 0.005f : row % 11 == 5 ? 60.0f : 8.0f;
      for (int i = 0; i < kVocab; ++i) logits_.push_back(spread * random_unit(5 + static_cast<uint64_t>(row), i));
    }
    slots_.newest = place(memory_[0], std::vector<int32_t>(kRows));
    slots_.num_outputs = place(memory_[1], std::vector<int32_t>(kRows, 4));
    slots_.params = place(memory_[2], params);
    slots_.listed_ids = place(memory_[3], ids);
    slots_.listed_bias = place(memory_[4], bias);
    slots_.counts = place(memory_[5], std::vector<uint32_t>(static_cast<size_t>(kRows * slots_.count_words())));
    slots_.seen = place(memory_[6], std::vector<uint32_t>(static_cast<size_t>(kRows * slots_.bit_words())));
    call_ = {.samples = place(memory_[7], samples_), .count = kRows, .masks = place(memory_[8], masks)};
    call_.work = place(memory_[9], std::vector<float>(static_cast<size_t>(kRows) * kVocab));
    memory_[12] = device_buffer(static_cast<size_t>(sample_scratch_bytes(kRows)));
    call_.scratch = memory_[12].data();
    call_.results = place(memory_[10], std::vector<SampleResult>(kRows));
  }

  std::vector<SampleResult> run() {
    call_.logits = place(memory_[11], logits_);
    EXPECT_EQ(sample_rows(call_, slots_, nullptr), cudaSuccess);
    std::vector<SampleResult> results(kRows);
    device_copy(results.data(), call_.results, results.size() * sizeof(SampleResult));
    EXPECT_TRUE(device_status().ok());
    return results;
  }

  SlotArrays slots_;
  SampleCall call_;
  std::vector<SampleRecord> samples_;
  std::vector<float> logits_;
  int32_t num_masks_ = 0;
  Buffer memory_[13];
};

// Several tokens in a row, so that counts of sampled ids matter.
TEST_F(Sampling, SameIdsAsTheHost) {
  Sampler host(kVocab);
  std::vector<std::vector<uint16_t>> counts(kRows, std::vector<uint16_t>(kVocab));
  std::vector<std::vector<uint8_t>> seen(kRows, std::vector<uint8_t>((kVocab + 7) / 8));
  for (int step = 0; step < (gpu_sanitizer() ? 2 : 20); ++step) {
    const std::vector<SampleResult> results = run();
    for (int row = 0; row < kRows; ++row) {
      const SamplingParams p = params_of(row);
      const std::vector<uint32_t> mask = is_masked(row) ? mask_of(row) : std::vector<uint32_t>();
      const auto at = static_cast<size_t>(row);
      SamplerRow wanted{.logits = std::span(logits_).subspan(at * kVocab, kVocab), .params = &p};
      wanted.num_outputs = 4 + step;
      if (p.has_penalties()) wanted.output_counts = counts[at], wanted.seen = seen[at];
      wanted.mask = mask;
      const SampledToken token = host.sample(wanted);
      const SampleResult& got = results[at];
      ASSERT_EQ(got.finite != 0, token.finite);
      ASSERT_EQ(got.id, token.id) << "row " << row << " step " << step;
      ++counts[at][static_cast<size_t>(token.id)];
      seen[at][static_cast<size_t>(token.id) / 8] |= static_cast<uint8_t>(1u << (token.id % 8));
      if (p.logprobs < 0) continue;
      ASSERT_NEAR(got.score.logprob, token.logprobs.logprob, 1e-4);
      ASSERT_EQ(got.score.rank, token.logprobs.rank);
      ASSERT_EQ(got.score.num_top, p.logprobs);
      for (int i = 0; i < got.score.num_top; ++i) {
        ASSERT_EQ(got.score.top_ids[i], token.logprobs.top[static_cast<size_t>(i)].first);
        ASSERT_NEAR(got.score.top_logprobs[i], token.logprobs.top[static_cast<size_t>(i)].second, 1e-4);
      }
    }
  }
}

// Rows that verify drafts.
class SamplingOfDrafts : public Sampling {
 protected:
  static constexpr int kPlaces = 4;

  // What a sequence has been given so far.
  struct HostRow {
    std::vector<uint16_t> counts = std::vector<uint16_t>(kVocab);
    std::vector<uint8_t> seen = std::vector<uint8_t>((kVocab + 7) / 8);
    int32_t num_outputs = 4, length = 100;
  };

  void SetUp() override {
    Sampling::SetUp();
    if (IsSkipped()) return;
    std::vector<SampleRecord> samples;
    std::vector<uint32_t> masks;
    int32_t num_masks = 0;
    for (const SampleRecord& row : samples_)
      for (int place = 0; place < kPlaces; ++place) {
        SampleRecord& sample = samples.emplace_back(row);
        sample.logit_row = row.slot * kPlaces + place;
        if (place > num_drafts(row.slot)) sample.slot = -1;
        if (!is_masked(row.slot)) continue;
        sample.mask_row = num_masks++;
        const std::vector<uint32_t> words = mask_of(row.slot, place);
        masks.insert(masks.end(), words.begin(), words.end());
      }
    logits_.clear();
    for (int i = 0; i < kRows * kPlaces * kVocab; ++i) logits_.push_back(8.0f * random_unit(5, i));
    slots_.length = place(more_[0], std::vector<int32_t>(kRows, 100));
    slots_.drafts = place(more_[1], std::vector<int32_t>(kRows * kMaxDrafts));
    call_.samples = place(more_[2], samples);
    call_.masks = place(more_[10], masks);
    call_.count = kRows * kPlaces;
    call_.places = kPlaces;
    call_.work = place(more_[3], std::vector<float>(logits_.size()));
    more_[4] = device_buffer(static_cast<size_t>(sample_scratch_bytes(call_.count)));
    call_.scratch = more_[4].data();
    call_.results = place(more_[5], std::vector<SampleResult>(kRows * kPlaces));
    call_.picks = place(more_[6], std::vector<Pick>(kRows * kPlaces));
    call_.outcomes = place(more_[7], std::vector<RowOutcome>(kRows));
    call_.committed = place(more_[8], std::vector<int32_t>(kRows, 99));
    call_.commit = place(more_[9], std::vector<int32_t>(kRows, 100));
    call_.logits = place(memory_[11], logits_);
  }

  // That the row has room for.
  static int32_t num_drafts(int row) { return std::min(row % 5, kPlaces - 1); }

  SampledToken sample_on_host(int row, int place, const HostRow& state) {
    const SamplingParams p = params_of(row);
    const std::vector<uint32_t> mask = is_masked(row) ? mask_of(row, place) : std::vector<uint32_t>();
    SamplerRow wanted{.logits = std::span(logits_).subspan(static_cast<size_t>(row * kPlaces + place) * kVocab, kVocab),
                      .params = &p,
                      .num_outputs = state.num_outputs};
    if (p.has_penalties()) wanted.output_counts = state.counts, wanted.seen = state.seen;
    wanted.mask = mask;
    return host_.sample(wanted);
  }
  static void accept(HostRow& state, int32_t id) {
    ++state.counts[static_cast<size_t>(id)];
    state.seen[static_cast<size_t>(id) / 8] |= static_cast<uint8_t>(1u << (id % 8));
    ++state.num_outputs;
  }

  // Drafts of which the first `num_right` are what the host samples, and then one that is not, or none.
  DraftIds drafts_of(int row, int num_right, HostRow state) {
    DraftIds drafts;
    for (int place = 0; place < kMaxDrafts; ++place) {
      if (place > num_right || place >= kPlaces) {
        drafts.push_back(-1);
        continue;
      }
      const int32_t id = sample_on_host(row, place, state).id;
      drafts.push_back(place < num_right ? id : (row + num_right) % 3 == 0 ? -1 : (id + 1) % kVocab);
      accept(state, id);
    }
    return drafts;
  }

  Sampler host_{kVocab};
  Buffer more_[11];
};

// Each place as if the drafts before it had been sampled: with penalties that count them and draws that go on.
TEST_F(SamplingOfDrafts, AreKeptUpToTheFirstThatIsNotSampled) {
  std::vector<HostRow> state(kRows);
  std::array<int, kPlaces + 1> kept{};
  for (int step = 0; step < (gpu_sanitizer() ? 2 : 8); ++step) {
    std::vector<DraftIds> drafts;
    for (int row = 0; row < kRows; ++row) {
      drafts.push_back(drafts_of(row, (row + step) % kPlaces, state[static_cast<size_t>(row)]));
      device_copy(slots_.drafts + row * kMaxDrafts, drafts.back().begin(), kMaxDrafts * 4);
    }
    ASSERT_EQ(sample_rows(call_, slots_, nullptr), cudaSuccess);
    ASSERT_EQ(accept_picks(call_, call_.picks, slots_, nullptr), cudaSuccess);
    std::vector<SampleResult> results(kRows * kPlaces);
    std::vector<RowOutcome> outcomes(kRows);
    std::vector<int32_t> newest(kRows), lengths(kRows), outputs(kRows);
    device_copy(results.data(), call_.results, results.size() * sizeof(SampleResult));
    device_copy(outcomes.data(), call_.outcomes, kRows * sizeof(RowOutcome));
    device_copy(newest.data(), slots_.newest, kRows * 4);
    device_copy(lengths.data(), slots_.length, kRows * 4);
    device_copy(outputs.data(), slots_.num_outputs, kRows * 4);
    ASSERT_TRUE(device_status().ok());
    for (int row = 0; row < kRows; ++row) {
      SCOPED_TRACE(testing::Message() << "row " << row << " step " << step);
      const auto at = static_cast<size_t>(row);
      HostRow& host = state[at];
      int count = 0;
      for (bool goes_on = true; goes_on; ++count) {
        const SampledToken token = sample_on_host(row, count, host);
        const SampleResult& got = results[at * kPlaces + static_cast<size_t>(count)];
        ASSERT_EQ(got.id, token.id) << "place " << count;
        ASSERT_EQ(got.finite, 1);
        if (params_of(row).logprobs >= 0) {
          ASSERT_NEAR(got.score.logprob, token.logprobs.logprob, 1e-4);
        }
        accept(host, token.id);
        goes_on = count < num_drafts(row) && drafts[at][static_cast<size_t>(count)] == token.id;
      }
      host.length += count - 1;
      ++kept[static_cast<size_t>(count)];
      const auto none = std::find(drafts[at].begin(), drafts[at].end(), -1);
      EXPECT_EQ(outcomes[at].num_ids, count);
      EXPECT_EQ(outcomes[at].num_drafts, std::min<int64_t>(num_drafts(row), none - drafts[at].begin()));
      EXPECT_EQ(outcomes[at].committed, 99);
      EXPECT_EQ(outcomes[at].position, 100);
      EXPECT_EQ(newest[at], results[at * kPlaces + static_cast<size_t>(count) - 1].id);
      EXPECT_EQ(lengths[at], host.length);
      EXPECT_EQ(outputs[at], host.num_outputs);
    }
  }
  for (int count = 1; count <= kPlaces; ++count) EXPECT_GT(kept[static_cast<size_t>(count)], 0) << count;
}

// Whatever the model says of them.
TEST_F(SamplingOfDrafts, AreAcceptedByChanceWhereRatesAreGiven) {
  call_.synthetic = {.count = 3, .rates = {1, 0.5f, 0}};
  std::vector<int32_t> drafts;
  for (int row = 0; row < kRows; ++row)
    for (int place = 0; place < kMaxDrafts; ++place) drafts.push_back(10 * row + place);
  device_copy(slots_.drafts, drafts.data(), drafts.size() * 4);
  std::array<int, kPlaces + 1> kept{};
  for (int step = 0; step < (gpu_sanitizer() ? 2 : 20); ++step) {
    ASSERT_EQ(sample_rows(call_, slots_, nullptr), cudaSuccess);
    ASSERT_EQ(accept_picks(call_, call_.picks, slots_, nullptr), cudaSuccess);
    std::vector<SampleResult> results(kRows * kPlaces);
    std::vector<RowOutcome> outcomes(kRows);
    device_copy(results.data(), call_.results, results.size() * sizeof(SampleResult));
    device_copy(outcomes.data(), call_.outcomes, kRows * sizeof(RowOutcome));
    for (int row = 0; row < kRows; ++row) {
      const RowOutcome& outcome = outcomes[static_cast<size_t>(row)];
      ++kept[static_cast<size_t>(outcome.num_ids)];
      ASSERT_LE(outcome.num_ids, 1 + std::min(num_drafts(row), 2));
      ASSERT_GE(outcome.num_ids, 1 + std::min(num_drafts(row), 1));
      for (int place = 0; place + 1 < outcome.num_ids; ++place)
        ASSERT_EQ(results[static_cast<size_t>(row * kPlaces + place)].id, 10 * row + place);
    }
  }
  if (gpu_sanitizer()) return;
  EXPECT_GT(kept[2], 50);
  EXPECT_GT(kept[3], 50);
}

TEST_F(Sampling, SaysWhatIsNotFinite) {
  logits_[3] = std::numeric_limits<float>::quiet_NaN();
  logits_[2 * kVocab - 1] = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kVocab; ++i) logits_[2 * kVocab + i] = -std::numeric_limits<float>::infinity();
  const std::vector<SampleResult> results = run();
  for (int row = 0; row < kRows; ++row) EXPECT_EQ(results[static_cast<size_t>(row)].finite, row < 3 ? 0 : 1) << row;
}

// Padding of a graph.
TEST_F(Sampling, LeavesRowsWithoutASlotAlone) {
  std::vector<SampleRecord> padded = samples_;
  padded[5].slot = padded[kRows - 1].slot = -1;
  device_copy(const_cast<SampleRecord*>(call_.samples), padded.data(), padded.size() * sizeof(SampleRecord));
  const std::vector<SampleResult> results = run();
  std::vector<int32_t> newest(kRows), outputs(kRows);
  device_copy(newest.data(), slots_.newest, kRows * 4);
  device_copy(outputs.data(), slots_.num_outputs, kRows * 4);
  for (int row = 0; row < kRows; ++row) {
    const auto at = static_cast<size_t>(row);
    const bool sampled = padded[at].slot >= 0;
    EXPECT_EQ(outputs[at], sampled ? 5 : 4) << row;
    EXPECT_EQ(newest[at], sampled ? results[at].id : 0) << row;
    EXPECT_EQ(results[at].finite, sampled ? 1 : 0) << row;
  }
}

// Many equal logits, and fewer than top_k open ones.
TEST_F(Sampling, TiesTakeTheLowerId) {
  std::fill(logits_.begin(), logits_.end(), 1.0f);
  Sampler host(kVocab);
  const std::vector<SampleResult> results = run();
  for (int row = 0; row < kRows; ++row) {
    const SamplingParams p = params_of(row);
    if (p.has_penalties() || is_masked(row)) continue;
    const auto at = static_cast<size_t>(row);
    const SamplerRow wanted{.logits = std::span(logits_).subspan(at * kVocab, kVocab), .params = &p, .num_outputs = 4};
    EXPECT_EQ(results[at].id, host.sample(wanted).id) << row;
  }
}

// A rank of two that have half of the vocabulary each.
struct RankOfTwo {
  SlotArrays slots;
  SampleCall call;
  std::vector<Buffer> memory = std::vector<Buffer>(9);
};

constexpr int kRanks = 2, kShare = kVocab / kRanks;

bool is_by_largest(int row) {
  return !is_masked(row) && Sampler::takes_largest(params_of(row), 0);
}

class SamplingByTwo : public Sampling {
 protected:
  void make(int r, RankOfTwo& rank) {
    const int64_t kept = (kRows + kRanks - 1) / kRanks;
    rank.slots = slots_;
    rank.slots.rank = r;
    rank.slots.ranks = kRanks;
    rank.slots.newest = place(rank.memory[0], std::vector<int32_t>(kRows));
    rank.slots.num_outputs = place(rank.memory[1], std::vector<int32_t>(kRows, 4));
    rank.slots.counts = place(rank.memory[2], std::vector<uint32_t>(static_cast<size_t>(kept * slots_.count_words())));
    rank.slots.seen = place(rank.memory[3], std::vector<uint32_t>(static_cast<size_t>(kept * slots_.bit_words())));
    rank.call = call_;
    std::vector<SampleRecord> samples = samples_;
    std::vector<float> whole, shares;
    for (int row = 0; row < kRows; ++row) {
      const float* x = logits_.data() + static_cast<size_t>(row) * kVocab;
      shares.insert(shares.end(), x + r * kShare, x + (r + 1) * kShare);
      SampleRecord& sample = samples[static_cast<size_t>(row)];
      sample.rank = is_by_largest(row) ? kEveryRank : row % kRanks;
      if (sample.rank != r) continue;
      sample.logit_row = static_cast<int32_t>(whole.size() / kVocab);
      whole.insert(whole.end(), x, x + kVocab);
    }
    rank.call.samples = place(rank.memory[4], samples);
    rank.call.logits = place(rank.memory[5], whole);
    rank.call.shares = place(rank.memory[6], shares);
    rank.call.picks = place(rank.memory[7], std::vector<Pick>(kRows));
    rank.call.results = place(rank.memory[8], std::vector<SampleResult>(kRows));
  }
};

// Rows that the largest logit decides are sampled by both ranks, the others whole by one of them. Both get the ids that
// one rank gets, and only the slot's rank counts them.
TEST_F(SamplingByTwo, RanksThatShareTheVocabularyGetTheSameIds) {
  constexpr int kSteps = 3;
  ASSERT_TRUE(std::any_of(samples_.begin(), samples_.end(), [&](const auto& s) { return is_by_largest(s.slot); }));
  for (int row = 0; row < kRows; ++row) {  // ties between and within shares
    float* x = logits_.data() + static_cast<size_t>(row) * kVocab;
    x[kShare + row] = x[row + 1] = x[kVocab - 1 - row] = 70.0f;
  }
  std::vector<RankOfTwo> ranks(kRanks);
  for (int r = 0; r < kRanks; ++r) make(r, ranks[static_cast<size_t>(r)]);
  Buffer all_memory;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<SampleResult> wanted = run();
    std::vector<Pick> all;
    for (RankOfTwo& rank : ranks) {
      ASSERT_EQ(sample_rows(rank.call, rank.slots, nullptr), cudaSuccess);
      all.resize(all.size() + kRows);
      device_copy(&*all.end() - kRows, rank.call.picks, kRows * sizeof(Pick));
    }
    const Pick* all_picks = place(all_memory, all);
    for (int r = 0; r < kRanks; ++r) {
      const RankOfTwo& rank = ranks[static_cast<size_t>(r)];
      ASSERT_EQ(accept_picks(rank.call, all_picks, rank.slots, nullptr), cudaSuccess);
      std::vector<SampleResult> got(kRows);
      std::vector<int32_t> newest(kRows), outputs(kRows);
      device_copy(got.data(), rank.call.results, kRows * sizeof(SampleResult));
      device_copy(newest.data(), rank.slots.newest, kRows * 4);
      device_copy(outputs.data(), rank.slots.num_outputs, kRows * 4);
      for (int row = 0; row < kRows; ++row) {
        const auto at = static_cast<size_t>(row);
        ASSERT_EQ(got[at].id, wanted[at].id) << "row " << row << ", step " << step << ", rank " << r;
        ASSERT_EQ(got[at].finite, wanted[at].finite);
        ASSERT_EQ(newest[at], wanted[at].id);
        ASSERT_EQ(outputs[at], 5 + step);
        if (row % kRanks != r || params_of(row).logprobs < 0) continue;
        ASSERT_FLOAT_EQ(got[at].score.logprob, wanted[at].score.logprob);
      }
    }
  }
}

// As ScoreRecord wants it, in f64.
void expect_score(std::span<const float> x, const ScoreRecord& wanted, const TokenScore& got) {
  double sum = 0;
  const float largest = *std::max_element(x.begin(), x.end());
  for (const float value : x) sum += std::exp(static_cast<double>(value) - largest);
  const auto logprob = [&](int32_t id) { return x[static_cast<size_t>(id)] - largest - std::log(sum); };
  const float own = x[static_cast<size_t>(wanted.id)];
  EXPECT_NEAR(got.logprob, logprob(wanted.id), 1e-4);
  EXPECT_EQ(got.rank, 1 + std::count_if(x.begin(), x.end(), [own](float value) { return value > own; }));
  std::vector<int32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [x](int32_t a, int32_t b) { return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)]; });
  ASSERT_EQ(got.num_top, std::min({wanted.top, kMaxTopLogprobs, static_cast<int32_t>(x.size())}));
  for (int i = 0; i < got.num_top; ++i) {
    EXPECT_EQ(got.top_ids[i], order[static_cast<size_t>(i)]) << i;
    EXPECT_NEAR(got.top_logprobs[i], logprob(order[static_cast<size_t>(i)]), 1e-4) << i;
  }
}

// Rows in any order, one twice; ids at both ends and where the row is largest; more wanted than are given or there.
TEST_F(Sampling, ScoresOfAPlainSoftmax) {
  const auto row_at = [this](int row) { return logits_.begin() + row * kVocab; };
  std::fill_n(row_at(4), kVocab, 1.0f);
  for (int i = 0; i < 300; ++i) row_at(6)[160 * i] = 9;  // more of the largest than are asked for
  std::fill_n(row_at(8), kVocab / 2, -std::numeric_limits<float>::infinity());
  call_.logits = place(memory_[11], logits_);
  for (const int32_t vocab : {kVocab, 1000, 7}) {
    const auto row_of = [&](int32_t row) {
      return std::span<const float>(logits_).subspan(static_cast<size_t>(row) * vocab, static_cast<size_t>(vocab));
    };
    std::vector<ScoreRecord> records;
    for (const int32_t row : {7, 4, 6, 8, 23, 5, 3, 7}) {
      const auto x = row_of(row);
      const auto largest = static_cast<int32_t>(std::max_element(x.begin(), x.end()) - x.begin());
      for (const auto& [id, top] :
           {std::pair(vocab - 1, 0), {largest, 1}, {vocab / 2, 5}, {vocab - 2, 20}, {largest, 25}})
        records.push_back({.logit_row = row, .id = id, .top = top});
    }
    Buffer asked, given;
    TokenScore* results = place(given, std::vector<TokenScore>(records.size()));
    ASSERT_EQ(
        score_rows(place(asked, records), static_cast<int32_t>(records.size()), call_.logits, vocab, results, nullptr),
        cudaSuccess);
    std::vector<TokenScore> scores(records.size());
    device_copy(scores.data(), results, scores.size() * sizeof(TokenScore));
    ASSERT_TRUE(device_status().ok());
    for (size_t i = 0; i < records.size(); ++i) {
      SCOPED_TRACE(testing::Message() << vocab << " ids, record " << i);
      expect_score(row_of(records[i].logit_row), records[i], scores[i]);
    }
  }
}

}  // namespace
}  // namespace perigee

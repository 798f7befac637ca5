// Expanded MLA attention: keys [W_UK c | k_rope] and values W_UV c of one head at a time, online softmax.
//
// A task is one head of a span of queries of a sequence. It keeps their running maxima, sums and outputs (transposed,
// [value][query], so that a query is a vector lane) and walks the keys in windows of 2,048: keys and values of a window
// are made once, then 256 queries at a time, few enough for the second-level cache, walk it 256 keys at a time.
#include <algorithm>
#include <span>

#include "ops/cpu/mla_call.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kTileKeys = 256;  // absolute multiples: the steps of the online softmax
constexpr int64_t kWindowKeys = 2048;
constexpr int64_t kBlockPairs = 8;
// Queries of one task: each span makes the keys and values before it again, so spans are as long as leaves every thread
// a few tasks.
constexpr int64_t kShortestSpan = 512, kLongestSpan = 4096;
constexpr int64_t kTasksOfThread = 4;
constexpr int64_t kPair = 2 * kPanel;

// Queries [first, first + count) of a sequence.
struct Span {
  const SequenceRows* sequence = nullptr;
  int64_t first = 0;
  int64_t count = 0;
  int64_t position() const { return sequence->position + first; }
};

// One thread's working memory.
struct Work {
  uint32_t* queries;  // panels of the span, depth query_depth; in two terms, the low ones after all high ones
  uint16_t* terms;    // of 16 queries: high [kPanel, query_depth], then low
  uint16_t* keys;     // [kWindowKeys, query_depth]
  uint16_t* values;   // for each tile of the window [value_columns, kTileKeys]
  uint16_t* block;    // see block_rows()
  float* expanded;    // [kBlockKeys, max(nope_columns, value_columns)]
  float* scores;      // [kTileKeys, kPair]
  uint32_t* weights;  // two panels [kTileKeys / 2, 16]
  float* outputs;     // for each pair of panels of the span [value_columns, kPair]
  float* max;         // [span]
  float* sum;         // [span]
};

class Expanded {
 public:
  explicit Expanded(const MlaCall& call) : call_(call), d_(call.dims), k_(call.kernels) {}
  void run();

 private:
  void choose_span();
  int64_t count_spans() const;
  void list_spans();
  Work make_work();
  void attend(const Span& span, int64_t head, Work& w);
  void load_queries(const Span& span, int64_t head, Work& w);
  void expand(const Span& span, int64_t head, int64_t begin, int64_t keys, Work& w);
  void expand_keys(const BlockRows& rows, int64_t head, int64_t valid, uint16_t* out, Work& w);
  void attend_keys(const Span& span, int64_t pair, int64_t begin, Work& w);
  void store(const Span& span, int64_t head, int64_t panel, const Work& w);

  const MlaCall& call_;
  const MlaDims& d_;
  const MlaKernels& k_;
  int64_t span_queries_ = 0;  // a multiple of kPair
  std::span<Span> spans_;
  std::span<Work> work_;
};

void Expanded::run() {
  choose_span();
  list_spans();
  if (spans_.empty()) return;
  ThreadPool& pool = call_.cpu.pool;
  work_ = call_.cpu.scratch.array<Work>(pool.size());
  for (Work& w : work_) w = make_work();
  const auto num_spans = static_cast<int64_t>(spans_.size());
  // Heads outermost: a thread's share is then whole heads, which cost the same, not early or late spans.
  pool.run(d_.heads * num_spans, [&](int64_t task, int thread) {
    attend(spans_[static_cast<size_t>(task % num_spans)], task / num_spans, work_[static_cast<size_t>(thread)]);
  });
}

void Expanded::choose_span() {
  int64_t longest = 0;
  for (const SequenceRows& s : call_.batch.sequences) longest = std::max<int64_t>(longest, s.num_tokens);
  span_queries_ = std::min(kLongestSpan, round_up(longest, kPair));
  const int64_t wanted = kTasksOfThread * call_.cpu.pool.size();
  while (span_queries_ > kShortestSpan && d_.heads * count_spans() < wanted)
    span_queries_ = round_up(span_queries_ / 2, kPair);
}

int64_t Expanded::count_spans() const {
  int64_t count = 0;
  for (const SequenceRows& s : call_.batch.sequences) {
    if (s.form == MlaForm::kExpanded) count += (s.num_tokens + span_queries_ - 1) / span_queries_;
  }
  return count;
}

void Expanded::list_spans() {
  spans_ = call_.cpu.scratch.array<Span>(count_spans());
  size_t i = 0;
  for (const SequenceRows& s : call_.batch.sequences) {
    if (s.form != MlaForm::kExpanded) continue;
    for (int64_t first = 0; first < s.num_tokens; first += span_queries_) {
      spans_[i++] = {.sequence = &s, .first = first, .count = std::min(span_queries_, s.num_tokens - first)};
    }
  }
}

Work Expanded::make_work() {
  Arena& arena = call_.cpu.scratch;
  return {.queries = arena.array<uint32_t>(2 * span_queries_ * d_.query_depth / 2).data(),
          .terms = arena.array<uint16_t>(2 * kPanel * d_.query_depth).data(),
          .keys = arena.array<uint16_t>(kWindowKeys * d_.query_depth).data(),
          .values = arena.array<uint16_t>(kWindowKeys * d_.value_columns).data(),
          .block = arena.array<uint16_t>(block_scratch_elements(d_)).data(),
          .expanded = arena.array<float>(kBlockKeys * std::max(d_.nope_columns, d_.value_columns)).data(),
          .scores = arena.array<float>(kTileKeys * kPair).data(),
          .weights = arena.array<uint32_t>(2 * kTileKeys / 2 * kPanel).data(),
          .outputs = arena.array<float>(span_queries_ * d_.value_columns).data(),
          .max = arena.array<float>(span_queries_).data(),
          .sum = arena.array<float>(span_queries_).data()};
}

void Expanded::attend(const Span& span, int64_t head, Work& w) {
  const int64_t num_queries = round_up(span.count, kPair);
  load_queries(span, head, w);
  std::fill_n(w.outputs, num_queries * d_.value_columns, 0.0f);
  std::fill_n(w.max, num_queries, kNoScore);
  std::fill_n(w.sum, num_queries, 0.0f);
  const int64_t end = span.position() + span.count;
  for (int64_t window = 0; window < end; window += kWindowKeys) {
    const int64_t window_end = std::min(window + kWindowKeys, end);
    for (int64_t begin = window; begin < window_end; begin += kTileKeys)
      expand(span, head, begin, std::min(kTileKeys, window_end - begin), w);
    for (int64_t first = 0; first < num_queries / kPair; first += kBlockPairs) {
      const int64_t past = std::min(first + kBlockPairs, num_queries / kPair);
      for (int64_t begin = window; begin < window_end; begin += kTileKeys) {
        for (int64_t pair = first; pair < past; ++pair) attend_keys(span, pair, begin, w);
      }
    }
  }
  for (int64_t panel = 0; panel * kPanel < span.count; ++panel) store(span, head, panel, w);
}

void Expanded::load_queries(const Span& span, int64_t head, Work& w) {
  const int64_t width = d_.nope + d_.rope;
  for (int64_t panel = 0; panel < round_up(span.count, kPair) / kPanel; ++panel) {
    const uint16_t *high[kPanel] = {}, *low[kPanel] = {};
    for (int64_t i = 0; i < kPanel && panel * kPanel + i < span.count; ++i) {
      const int64_t row = span.sequence->first_row + span.first + panel * kPanel + i;
      uint16_t* term = w.terms + i * d_.query_depth;
      k_.split(call_.q.row<const float>(row) + head * width, 1.0f, width, term, term + kPanel * d_.query_depth);
      high[i] = term;
      low[i] = term + kPanel * d_.query_depth;
    }
    uint32_t* to = w.queries + panel * (d_.query_depth / 2) * kPanel;
    k_.pack_rows(high, width, d_.query_depth, to);
    k_.pack_rows(low, width, d_.query_depth, to + span_queries_ * d_.query_depth / 2);
  }
}

// Keys and values of this head for positions [begin, begin + keys), begin a multiple of 256. Values beyond are zero;
// keys beyond may be anything, their scores are masked.
void Expanded::expand(const Span& span, int64_t head, int64_t begin, int64_t keys, Work& w) {
  uint16_t* tile_keys = w.keys + begin % kWindowKeys * d_.query_depth;
  uint16_t* tile_values = w.values + begin % kWindowKeys * d_.value_columns;
  for (int64_t key = 0; key < keys; key += kBlockKeys) {
    const int64_t valid = std::min(kBlockKeys, keys - key);
    const BlockRows rows = block_rows(call_, *span.sequence, (begin + key) / kBlockKeys, valid, w.block);
    expand_keys(rows, head, valid, tile_keys + key * d_.query_depth, w);
    k_.multiply({.a = rows.rows,
                 .a_stride = rows.stride,
                 .b = PackedMlaUp::head(call_.up->values, head, d_.latent_depth, d_.value_columns),
                 .panel_stride = d_.latent_depth / 2 * kPanel,
                 .c = w.expanded,
                 .c_stride = d_.value_columns,
                 .m = valid,
                 .k = d_.latent_depth,
                 .columns = d_.value_columns,
                 .accumulate = false});
    k_.transpose_values(w.expanded, kBlockKeys, valid, d_.value_columns, kTileKeys, tile_values + key);
  }
}

void Expanded::expand_keys(const BlockRows& rows, int64_t head, int64_t valid, uint16_t* out, Work& w) {
  k_.multiply({.a = rows.rows,
               .a_stride = rows.stride,
               .b = PackedMlaUp::head(call_.up->keys, head, d_.latent_depth, d_.nope_columns),
               .panel_stride = d_.latent_depth / 2 * kPanel,
               .c = w.expanded,
               .c_stride = d_.nope_columns,
               .m = valid,
               .k = d_.latent_depth,
               .columns = d_.nope_columns,
               .accumulate = false});
  for (int64_t r = 0; r < valid; ++r, out += d_.query_depth) {
    k_.narrow(w.expanded + r * d_.nope_columns, 1.0f, d_.nope, out);
    std::copy_n(rows.rows + r * rows.stride + d_.latent, d_.rope, out + d_.nope);
    std::fill(out + d_.nope + d_.rope, out + d_.query_depth, uint16_t{0});
  }
}

// 32 queries meet those keys of the tile from `begin` on that the last of them sees.
void Expanded::attend_keys(const Span& span, int64_t pair, int64_t begin, Work& w) {
  const int64_t last = span.position() + std::min((pair + 1) * kPair, span.count) - 1;
  const int64_t keys = std::min(kTileKeys, last + 1 - begin);
  if (keys <= 0) return;
  const int64_t padded = round_up(keys, kDepth);
  const uint32_t* queries = w.queries + pair * 2 * (d_.query_depth / 2) * kPanel;
  k_.multiply({.a = w.keys + begin % kWindowKeys * d_.query_depth,
               .a_stride = d_.query_depth,
               .b = queries,
               .b_low = queries + span_queries_ * d_.query_depth / 2,
               .panel_stride = d_.query_depth / 2 * kPanel,
               .c = w.scores,
               .c_stride = kPair,
               .m = keys,
               .k = d_.query_depth,
               .columns = std::min(kPair, span.count - pair * kPair),
               .accumulate = false});
  float* outputs = w.outputs + pair * kPair * d_.value_columns;
  for (int64_t panel = 0; panel < 2; ++panel) {
    alignas(64) float fade[kPanel];
    int32_t limit[kPanel];
    const int64_t first = pair * kPair + panel * kPanel;
    for (int64_t i = 0; i < kPanel; ++i) {
      const int64_t visible = span.position() + first + i + 1 - begin;
      limit[i] = first + i < span.count ? static_cast<int32_t>(std::clamp<int64_t>(visible, 0, keys)) : 0;
    }
    k_.softmax({.scores = w.scores + panel * kPanel,
                .stride = kPair,
                .num_keys = padded,
                .limit = limit,
                .scale = call_.scale,
                .max = w.max + first,
                .sum = w.sum + first,
                .fade = fade,
                .weights = w.weights + panel * kTileKeys / 2 * kPanel});
    k_.fade(outputs + panel * kPanel, d_.value_columns, kPair, fade);
  }
  k_.multiply({.a = w.values + begin % kWindowKeys * d_.value_columns,
               .a_stride = kTileKeys,
               .b = w.weights,
               .panel_stride = kTileKeys / 2 * kPanel,
               .c = outputs,
               .c_stride = kPair,
               .m = d_.value_columns,
               .k = padded,
               .columns = std::min(kPair, span.count - pair * kPair),
               .accumulate = true});
}

// Outputs [value][query] of one panel, divided by their sums, into the rows of the result.
void Expanded::store(const Span& span, int64_t head, int64_t panel, const Work& w) {
  const float* outputs = w.outputs + panel / 2 * kPair * d_.value_columns + panel % 2 * kPanel;
  for (int64_t v = 0; v < d_.value_columns; v += kPanel) {
    alignas(64) uint32_t block[kPanel * kPanel], turned[kPanel * kPanel];
    alignas(64) float row[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) std::memcpy(block + i * kPanel, outputs + (v + i) * kPair, sizeof(row));
    k_.transpose(block, kPanel, kPanel, turned);
    for (int64_t i = 0; i < kPanel && panel * kPanel + i < span.count; ++i) {
      const int64_t query = panel * kPanel + i;
      const auto width = static_cast<size_t>(std::min(kPanel, d_.value - v));
      std::memcpy(row, turned + i * kPanel, sizeof(row));
      k_.scale(row, 1.0f / w.sum[query], kPanel);
      float* out = call_.out.row<float>(span.sequence->first_row + span.first + query) + head * d_.value + v;
      std::memcpy(out, row, width * sizeof(float));
    }
  }
}

}  // namespace

void attend_expanded(const MlaCall& call) {
  Expanded(call).run();
}

}  // namespace perigee::cpu

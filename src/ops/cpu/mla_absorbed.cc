// Absorbed MLA attention: q~ = W_UK^T q_nope meets cached rows; u = sum p c; out = W_UV u.
#include <algorithm>
#include <cmath>
#include <span>

#include "ops/cpu/mla_call.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPieceKeys = 1024;         // absolute multiples (DESIGN D10)
constexpr int64_t kTileRows = 64;            // query rows (token, head) that share one reading of the keys
constexpr int64_t kTokenTile = 32;           // tokens of one task of the per-head projections
static_assert(kPieceKeys % kStepKeys == 0);  // the steps of the online softmax, absolute multiples too
constexpr int64_t kStepBlocks = kStepKeys / kBlockKeys;
constexpr int64_t kPartialBytes = 64 << 20;  // of partial results kept at a time

// Query rows [first_row, first_row + num_rows) of a sequence; row r is token r / heads, head r % heads.
struct Tile {
  const SequenceRows* sequence = nullptr;
  int64_t first_token = 0;  // of the sequence, among all absorbed tokens
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t num_keys = 0;  // that its last row sees, of those that lie here
  int64_t num_pieces() const { return (num_keys + kPieceKeys - 1) / kPieceKeys; }
  int64_t panels() const { return (num_rows + kPanel - 1) / kPanel; }
};

struct Piece {
  const Tile* tile = nullptr;
  int64_t index = 0;
  Partial* parts = nullptr;  // [kTileRows]
  float* output = nullptr;   // [panels * 16, latent_depth]
};

// One thread's working memory.
struct Work {
  uint16_t* rows;                 // two terms [kTokenTile, nope_depth]
  float* projected;               // [kTokenTile, max(latent_depth, value_columns)]
  uint32_t* queries;              // a tile's rows, packed by sixteen
  float* scores;                  // [kStepKeys, kTileRows]
  uint32_t* weights;              // one panel [kStepKeys / 2, 16]
  uint32_t* turned;               // [kTileRows, kStepKeys / 2] words: the weights, row-major bf16
  uint16_t* block;                // kStepBlocks times, see block_rows()
  float* output;                  // [kTileRows, latent_depth] of one piece
  float* total;                   // [kTileRows, latent_depth] of a tile
  Partial* parts;                 // [kTileRows]
  BlockRows blocks[kStepBlocks];  // the keys of a step
};

// Where 16 query rows stand within a piece.
struct Running {
  Work& w;
  float *max, *sum, *fade;  // [16]
};

class Absorbed {
 public:
  explicit Absorbed(const MlaCall& call);
  void run();
  void run_absorb();
  void run_attend();
  void run_project();

 private:
  void list_tokens();
  void list_tiles();
  Work make_work();
  void make_attended();
  void absorb();
  void attend();
  void project();
  void absorb_task(int64_t task, Work& w);
  void project_task(int64_t task, Work& w);
  void attend_whole_tiles();
  void attend_by_pieces();
  void attend_pieces(std::span<const Piece> pieces);
  int64_t partial_floats(const Tile& tile) const {
    return tile.num_pieces() * tile.panels() * kPanel * d_.latent_depth;
  }
  void load_queries(const Tile& tile, Work& w);
  void piece(const Tile& tile, int64_t index, Work& w, Partial* parts, float* output);
  void scores(const Tile& tile, int64_t begin, int64_t keys, Work& w);
  void soften(const Tile& tile, int64_t row, int64_t begin, int64_t keys, const Running& running);
  void add_values(const Tile& tile, int64_t begin, int64_t keys, Work& w, float* output);
  void store(const Tile& tile, int64_t row, const Partial& part, const float* total);
  void store_result(int64_t row, const Partial& part, const float* total);
  void split(const float* x, float factor, int64_t at);
  int64_t num_token_tiles() const { return (num_tokens_ + kTokenTile - 1) / kTokenTile; }

  const MlaCall& call_;
  const MlaDims& d_;
  const MlaKernels& k_;
  int64_t num_tokens_ = 0;
  std::span<int32_t> token_rows_;  // batch row of each absorbed token
  std::span<Tile> tiles_;
  std::span<Piece> pieces_;
  std::span<Work> work_;
  const int64_t width_;          // of a query
  uint16_t* queries_ = nullptr;  // [tokens, heads, L + dr]: [q~ | q_rope]
  // u in two terms, each [tokens rounded up to kTokenTile, heads, latent_depth]; null: results go to call_.out
  uint16_t* attended_ = nullptr;
  uint16_t* attended_low_ = nullptr;
};

Absorbed::Absorbed(const MlaCall& call)
    : call_(call), d_(call.dims), k_(call.kernels), width_(call.dims.latent + call.dims.rope) {
  list_tokens();
  if (num_tokens_ == 0) return;
  work_ = call_.cpu.scratch.array<Work>(call_.cpu.pool.size());
  for (Work& w : work_) w = make_work();
}

void Absorbed::run() {
  if (num_tokens_ == 0) return;
  list_tiles();
  queries_ = call_.cpu.scratch.array<uint16_t>(num_tokens_ * d_.heads * width_).data();
  make_attended();
  absorb();
  attend();
  project();
}

void Absorbed::run_absorb() {
  queries_ = call_.out.row<uint16_t>(0);
  absorb();
}

void Absorbed::run_attend() {
  list_tiles();
  queries_ = call_.q.row<uint16_t>(0);
  attend();
}

void Absorbed::run_project() {
  make_attended();
  call_.cpu.pool.run(num_tokens_ * d_.heads, [this](int64_t row, int) {
    split(call_.q.row<const float>(0) + row * d_.latent, 1.0f, row * d_.latent_depth);
  });
  project();
}

void Absorbed::make_attended() {
  const int64_t attended = num_token_tiles() * kTokenTile * d_.heads * d_.latent_depth;
  attended_ = call_.cpu.scratch.array<uint16_t>(2 * attended).data();
  attended_low_ = attended_ + attended;
}

void Absorbed::absorb() {
  call_.cpu.pool.run(d_.heads * num_token_tiles(),
                     [this](int64_t task, int thread) { absorb_task(task, work_[static_cast<size_t>(thread)]); });
}

// Enough tiles: each thread runs its own to the end. Else pieces in parallel and merged after; the same sums.
void Absorbed::attend() {
  const ThreadPool& pool = call_.cpu.pool;
  if (static_cast<int64_t>(tiles_.size()) >= 4 * pool.size() || pool.size() == 1) return attend_whole_tiles();
  attend_by_pieces();
  constexpr Partial kNone{.max = kNoScore, .sum = 0};
  for (const Tile& tile : tiles_)
    for (int64_t row = 0; tile.num_keys == 0 && row < tile.num_rows; ++row) store(tile, row, kNone, nullptr);
}

void Absorbed::project() {
  call_.cpu.pool.run(d_.heads * num_token_tiles(),
                     [this](int64_t task, int thread) { project_task(task, work_[static_cast<size_t>(thread)]); });
}

void Absorbed::list_tokens() {
  for (const SequenceRows& s : call_.batch.sequences) {
    if (s.form == MlaForm::kAbsorbed) num_tokens_ += s.num_tokens;
  }
  token_rows_ = call_.cpu.scratch.array<int32_t>(num_tokens_);
  size_t i = 0;
  for (const SequenceRows& s : call_.batch.sequences) {
    if (s.form != MlaForm::kAbsorbed) continue;
    for (int32_t t = 0; t < s.num_tokens; ++t) token_rows_[i++] = s.first_row + t;
  }
}

void Absorbed::list_tiles() {
  const int64_t most = num_tokens_ * d_.heads / kTileRows + static_cast<int64_t>(call_.batch.sequences.size());
  tiles_ = call_.cpu.scratch.array<Tile>(most);
  size_t count = 0;
  int64_t first_token = 0;
  for (const SequenceRows& s : call_.batch.sequences) {
    if (s.form != MlaForm::kAbsorbed) continue;
    const int64_t rows = s.num_tokens * d_.heads;
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t num_rows = std::min(kTileRows, rows - row);
      const int64_t last_token = (row + num_rows - 1) / d_.heads;
      tiles_[count++] = {.sequence = &s,
                         .first_token = first_token,
                         .first_row = row,
                         .num_rows = num_rows,
                         .num_keys = tokens_here(s, s.position + last_token + 1)};
    }
    first_token += s.num_tokens;
  }
  tiles_ = tiles_.first(count);
}

Work Absorbed::make_work() {
  Arena& arena = call_.cpu.scratch;
  return {.rows = arena.array<uint16_t>(2 * kTokenTile * d_.nope_depth).data(),
          .projected = arena.array<float>(kTokenTile * std::max(d_.latent_depth, d_.value_columns)).data(),
          .queries = arena.array<uint32_t>(kTileRows / kPanel * k_.query_words(d_.row_depth)).data(),
          .scores = arena.array<float>(kStepKeys * kTileRows).data(),
          .weights = arena.array<uint32_t>(kStepKeys / 2 * kPanel).data(),
          .turned = arena.array<uint32_t>(kTileRows * kStepKeys / 2).data(),
          .block = arena.array<uint16_t>(kStepBlocks * block_scratch_elements(d_)).data(),
          .output = arena.array<float>(kTileRows * d_.latent_depth).data(),
          .total = arena.array<float>(kTileRows * d_.latent_depth).data(),
          .parts = arena.array<Partial>(kTileRows).data()};
}

// One head of up to 32 tokens: q_nope [t, nope] times W_UK [nope, latent], and q_rope beside it.
void Absorbed::absorb_task(int64_t task, Work& w) {
  const int64_t head = task / num_token_tiles();
  const int64_t first = task % num_token_tiles() * kTokenTile;
  const int64_t count = std::min(kTokenTile, num_tokens_ - first);
  uint16_t* low = w.rows + kTokenTile * d_.nope_depth;
  std::fill_n(w.rows, 2 * kTokenTile * d_.nope_depth, uint16_t{0});
  const auto query = [&](int64_t t) {
    return call_.q.row<const float>(token_rows_[static_cast<size_t>(first + t)]) + head * (d_.nope + d_.rope);
  };
  for (int64_t t = 0; t < count; ++t)
    k_.split(query(t), 1.0f, d_.nope, w.rows + t * d_.nope_depth, low + t * d_.nope_depth);
  k_.multiply({.a = w.rows,
               .a_low = low,
               .a_stride = d_.nope_depth,
               .b = PackedMlaUp::head(call_.up->absorb, head, d_.nope_depth, d_.latent_depth),
               .panel_stride = d_.nope_depth / 2 * kPanel,
               .c = w.projected,
               .c_stride = d_.latent_depth,
               .m = count,
               .k = d_.nope_depth,
               .columns = d_.latent_depth,
               .accumulate = false});
  for (int64_t t = 0; t < count; ++t) {
    uint16_t* out = queries_ + ((first + t) * d_.heads + head) * width_;
    k_.narrow(w.projected + t * d_.latent_depth, 1.0f, d_.latent, out);
    k_.narrow(query(t) + d_.nope, 1.0f, d_.rope, out + d_.latent);
  }
}

// One head of up to 32 tokens: u [t, latent] times W_UV^T [latent, value].
void Absorbed::project_task(int64_t task, Work& w) {
  const int64_t head = task / num_token_tiles();
  const int64_t first = task % num_token_tiles() * kTokenTile;
  const int64_t count = std::min(kTokenTile, num_tokens_ - first);
  const int64_t begin = (first * d_.heads + head) * d_.latent_depth;
  k_.multiply({.a = attended_ + begin,
               .a_low = attended_low_ + begin,
               .a_stride = d_.heads * d_.latent_depth,
               .b = PackedMlaUp::head(call_.up->values, head, d_.latent_depth, d_.value_columns),
               .panel_stride = d_.latent_depth / 2 * kPanel,
               .c = w.projected,
               .c_stride = d_.value_columns,
               .m = count,
               .k = d_.latent_depth,
               .columns = d_.value_columns,
               .accumulate = false});
  for (int64_t t = 0; t < count; ++t) {
    float* out = call_.out.row<float>(token_rows_[static_cast<size_t>(first + t)]) + head * d_.value;
    std::copy_n(w.projected + t * d_.value_columns, d_.value, out);
  }
}

void Absorbed::attend_whole_tiles() {
  call_.cpu.pool.run(static_cast<int64_t>(tiles_.size()), [this](int64_t task, int thread) {
    const Tile& tile = tiles_[static_cast<size_t>(task)];
    Work& w = work_[static_cast<size_t>(thread)];
    Partial total[kTileRows];
    for (Partial& part : total) part = {.max = kNoScore, .sum = 0};
    load_queries(tile, w);
    for (int64_t p = 0; p < tile.num_pieces(); ++p) {
      piece(tile, p, w, w.parts, w.output);
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        const int64_t at = r * d_.latent_depth;
        k_.merge(total[r], w.total + at, w.parts[r], w.output + at, d_.latent_depth);
      }
    }
    for (int64_t r = 0; r < tile.num_rows; ++r) store(tile, r, total[r], w.total + r * d_.latent_depth);
  });
}

// As many tiles at a time as kPartialBytes hold the partial results of, at least one.
void Absorbed::attend_by_pieces() {
  int64_t all = 0, largest = 0, num_pieces = 0;
  for (const Tile& tile : tiles_) {
    all += partial_floats(tile);
    largest = std::max(largest, partial_floats(tile));
    num_pieces += tile.num_pieces();
  }
  const int64_t room = std::min(all, std::max(largest, kPartialBytes / static_cast<int64_t>(sizeof(float))));
  Arena& arena = call_.cpu.scratch;
  float* outputs = arena.array<float>(room).data();
  pieces_ = arena.array<Piece>(num_pieces);
  Partial* parts = arena.array<Partial>(num_pieces * kTileRows).data();
  for (size_t begin = 0; begin < tiles_.size();) {
    size_t end = begin, count = 0;
    int64_t used = 0;
    while (end < tiles_.size() && used + partial_floats(tiles_[end]) <= room) {
      const Tile& tile = tiles_[end++];
      for (int64_t p = 0; p < tile.num_pieces(); ++p) {
        pieces_[count] = {.tile = &tile,
                          .index = p,
                          .parts = parts + static_cast<int64_t>(count) * kTileRows,
                          .output = outputs + used};
        used += partial_floats(tile) / tile.num_pieces();
        ++count;
      }
    }
    attend_pieces(pieces_.first(count));
    begin = end;
  }
}

void Absorbed::attend_pieces(std::span<const Piece> pieces) {
  ThreadPool& pool = call_.cpu.pool;
  pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t task, int thread) {
    const Piece& p = pieces[static_cast<size_t>(task)];
    Work& w = work_[static_cast<size_t>(thread)];
    load_queries(*p.tile, w);
    piece(*p.tile, p.index, w, p.parts, p.output);
  });
  // The pieces of a tile lie together, in ascending order; a task merges those of one of its rows.
  pool.run(static_cast<int64_t>(pieces.size()) * kTileRows, [&](int64_t task, int thread) {
    const auto first = static_cast<size_t>(task / kTileRows);
    const int64_t row = task % kTileRows;
    const Tile& tile = *pieces[first].tile;
    if (pieces[first].index != 0 || row >= tile.num_rows) return;
    float* total = work_[static_cast<size_t>(thread)].total;
    Partial part{.max = kNoScore, .sum = 0};
    for (int64_t i = 0; i < tile.num_pieces(); ++i) {
      const Piece& p = pieces[first + static_cast<size_t>(i)];
      k_.merge(part, total, p.parts[row], p.output + row * d_.latent_depth, d_.latent_depth);
    }
    store(tile, row, part, total);
  });
}

void Absorbed::load_queries(const Tile& tile, Work& w) {
  for (int64_t panel = 0; panel < tile.panels(); ++panel) {
    const uint16_t* rows[kPanel] = {};
    for (int64_t i = 0; i < kPanel && panel * kPanel + i < tile.num_rows; ++i) {
      const int64_t row = tile.first_token * d_.heads + tile.first_row + panel * kPanel + i;
      rows[i] = queries_ + row * width_;
    }
    k_.pack_queries(rows, width_, d_.row_depth, w.queries + panel * k_.query_words(d_.row_depth));
  }
}

// Keys [index * 1024, ...) of the tile's rows: parts [rows] and output [rows, latent_depth], not yet normalised. Within
// the piece 256 keys at a time, so that their rows are still in the second cache when they serve as values.
void Absorbed::piece(const Tile& tile, int64_t index, Work& w, Partial* parts, float* output) {
  const int64_t begin = index * kPieceKeys;
  const int64_t end = std::min(begin + kPieceKeys, tile.num_keys);
  alignas(64) float max[kTileRows], sum[kTileRows], fade[kTileRows];
  std::fill_n(max, kTileRows, kNoScore);
  std::fill_n(sum, kTileRows, 0.0f);
  for (int64_t key = begin; key < end; key += kStepKeys) {
    const int64_t keys = std::min(kStepKeys, end - key);
    scores(tile, key, keys, w);
    for (int64_t panel = 0; panel < tile.panels(); ++panel) {
      const int64_t row = panel * kPanel;
      soften(tile, row, key, keys, {.w = w, .max = max + row, .sum = sum + row, .fade = fade + row});
    }
    if (key > begin) {
      for (int64_t r = 0; r < tile.num_rows; ++r) {
        if (fade[r] != 1.0f) k_.scale(output + r * d_.latent_depth, fade[r], d_.latent_depth);
      }
    }
    add_values(tile, key, keys, w, output);
  }
  for (int64_t r = 0; r < tile.num_rows; ++r) parts[r] = {.max = max[r], .sum = sum[r]};
}

void Absorbed::scores(const Tile& tile, int64_t begin, int64_t keys, Work& w) {
  for (int64_t key = 0; key < keys; key += kBlockKeys) {
    const int64_t valid = std::min(kBlockKeys, keys - key);
    const int64_t block = (begin + key) / kBlockKeys, in_step = key / kBlockKeys;
    if (begin + key + kBlockKeys < tile.num_keys) prefetch_block(call_, *tile.sequence, block + 1);
    BlockRows& rows = w.blocks[in_step];
    rows = block_rows(call_, *tile.sequence, block, valid, w.block + in_step * block_scratch_elements(d_));
    k_.scores({.keys = rows,
               .num_keys = valid,
               .queries = w.queries,
               .num_queries = tile.num_rows,
               .depth = d_.row_depth,
               .out = w.scores + key * kTileRows,
               .out_stride = kTileRows});
  }
}

// Scores of 16 query rows from `row` on become weights, row-major.
void Absorbed::soften(const Tile& tile, int64_t row, int64_t begin, int64_t keys, const Running& running) {
  const int64_t padded = round_up(keys, kDepth);
  int32_t limit[kPanel];
  for (int64_t i = 0; i < kPanel; ++i) {
    if (row + i >= tile.num_rows) {
      limit[i] = 0;
      continue;
    }
    const int64_t position = tile.sequence->position + (tile.first_row + row + i) / d_.heads;
    const int64_t visible = tokens_here(*tile.sequence, position + 1);
    limit[i] = static_cast<int32_t>(std::clamp<int64_t>(visible - begin, 0, keys));
  }
  Work& w = running.w;
  k_.softmax({.scores = w.scores + row,
              .stride = kTileRows,
              .num_keys = padded,
              .limit = limit,
              .scale = call_.scale,
              .max = running.max,
              .sum = running.sum,
              .fade = running.fade,
              .weights = w.weights});
  k_.transpose(w.weights, padded / 2, kStepKeys / 2, w.turned + row * kStepKeys / 2);
}

// output [rows, latent_depth] = (first step of a piece) or += weights times cached latents.
void Absorbed::add_values(const Tile& tile, int64_t begin, int64_t keys, Work& w, float* output) {
  k_.values({.weights = reinterpret_cast<const uint16_t*>(w.turned),
             .weight_stride = kStepKeys,
             .blocks = w.blocks,
             .num_keys = keys,
             .columns = d_.latent_depth,
             .num_queries = tile.num_rows,
             .out = output,
             .out_stride = d_.latent_depth,
             .accumulate = begin % kPieceKeys != 0});
}

// u = total / sum, for the projection or as a result of its own.
void Absorbed::store(const Tile& tile, int64_t row, const Partial& part, const float* total) {
  const int64_t at = tile.first_token * d_.heads + tile.first_row + row;
  if (attended_ == nullptr) return store_result(at, part, total);
  split(total, 1.0f / part.sum, at * d_.latent_depth);
}

// A row that sees nothing here has no total.
void Absorbed::store_result(int64_t row, const Partial& part, const float* total) {
  constexpr float kLn2 = 0.693147181f;
  float* out = call_.out.row<float>(row);
  if (is_empty(part)) {
    std::fill_n(out, d_.latent, 0.0f);
    out[d_.latent] = kNoScore;
    return;
  }
  const float factor = 1.0f / part.sum;
  for (int64_t i = 0; i < d_.latent; ++i) out[i] = total[i] * factor;
  out[d_.latent] = (part.max + std::log2(part.sum)) * kLn2;
}

// Columns beyond the latent are zero, whatever the padding of the values held.
void Absorbed::split(const float* x, float factor, int64_t at) {
  k_.split(x, factor, d_.latent, attended_ + at, attended_low_ + at);
  for (uint16_t* out : {attended_ + at, attended_low_ + at})
    std::fill(out + d_.latent, out + d_.latent_depth, uint16_t{0});
}

}  // namespace

void attend_absorbed(const MlaCall& call) {
  Absorbed(call).run();
}

void absorb_queries(const MlaCall& call) {
  Absorbed(call).run_absorb();
}

void attend_latents(const MlaCall& call) {
  Absorbed(call).run_attend();
}

void project_latents(const MlaCall& call) {
  Absorbed(call).run_project();
}

}  // namespace perigee::cpu

#include "ops/cpu/kda.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "ops/cpu/kda_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kMaxSteps = 64;  // uncommitted and new tokens of a sequence that run token by token
constexpr int64_t kState = kKdaDim * kKdaDim;
constexpr int64_t kTail = kKdaTaps - 1;

// Numbers too small for a normal f32 count as zero, as they cannot matter beside what decays into them, and cost a
// hundred times as much.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  const unsigned before_;
};

// Working memory of one thread.
struct alignas(kAlignment) Scratch {
  float q[kMaxSteps][kKdaDim], k[kMaxSteps][kKdaDim], v[kMaxSteps][kKdaDim];
  float g[kMaxSteps][kKdaDim], decay[kMaxSteps][kKdaDim], out[kMaxSteps][kKdaDim];
  float beta[kMaxSteps];
  float decayed_q[kMaxSteps][kKdaDim], decayed_k[kMaxSteps][kKdaDim];
  float tail[3][kTail][kKdaDim];
  float state[kState];  // slabs of it
  KdaRelations relations;
  const float* rows[3][kTail + kMaxSteps];
};

struct Call {
  const KdaKernels& kernels;
  const KdaInputs& in;
  const KdaWeights& w;
  const StateLayer& state;
  const Tensor& out;
};

// One head of one sequence: its tokens [committed, end).
class HeadRun {
 public:
  // `ahead` is the state that this thread is likely to be given next, or null.
  HeadRun(const Call& call, const SequenceRows& sequence, int64_t head, const float* ahead, Scratch& scratch)
      : call_(call),
        sequence_(sequence),
        head_(head),
        ahead_(ahead),
        width_(call.w.shape.width()),
        scratch_(scratch),
        unit_(unit(sequence.state_pages)),
        end_(sequence.position + sequence.num_tokens),
        commit_(sequence.commit_all ? end_ : sequence.position) {
    const auto reached_at = [&](int32_t position) {
      return std::partition_point(sequence.checkpoints.begin(), sequence.checkpoints.end(),
                                  [=](const StateCheckpoint& c) { return c.position <= position; });
    };
    checkpoints_ = {reached_at(sequence.committed), reached_at(std::max(commit_, sequence.committed))};
  }

  void run() {
    const int32_t steps_end = sequence_.commit_all ? sequence_.position : end_;
    if (steps_end > sequence_.committed) run_steps(steps_end);
    if (end_ > steps_end) run_chunks();
    // Inputs are read where they lie until here.
    for (const StateCheckpoint& checkpoint : checkpoints_) {
      gather_tail(checkpoint.position, scratch_.tail);
      std::memcpy(unit(checkpoint.pages) + kState, scratch_.tail, sizeof(scratch_.tail));
    }
    gather_tail(commit_, scratch_.tail);
    std::memcpy(unit_ + kState, scratch_.tail, sizeof(scratch_.tail));
    if (!sequence_.commit_all) write_ring();
  }

 private:
  float* unit(const int32_t* pages) const { return reinterpret_cast<float*>(call_.state.unit(pages, head_)); }
  float* ring(int32_t position) const {
    return reinterpret_cast<float*>(call_.state.ring_token(sequence_.slot, head_, position));
  }
  int64_t batch_row(int32_t position) const { return sequence_.first_row + position - sequence_.position; }

  // Input of the convolution: q, k or v of a position from committed - 3 on.
  const float* input(int64_t part, int32_t position) const {
    if (position < sequence_.committed) {
      return unit_ + kState + (part * kTail + position - sequence_.committed + kTail) * kKdaDim;
    }
    if (position < sequence_.position) return ring(position) + part * kKdaDim;
    return call_.in.qkv.row<const float>(batch_row(position)) + part * width_ + head_ * kKdaDim;
  }

  float beta(int32_t position) const {
    if (position < sequence_.position) return ring(position)[4 * kKdaDim];
    return 1.0f / (1.0f + std::exp(-call_.in.b.row<const float>(batch_row(position))[head_]));
  }

  // q, k, v, decay and beta of `count` tokens from position `begin` on.
  void prepare(int32_t begin, int32_t count) {
    Scratch& s = scratch_;
    const KdaKernels& kernels = call_.kernels;
    float(*parts[3])[kKdaDim] = {s.q, s.k, s.v};
    for (int64_t part = 0; part < 3; ++part) {
      for (int32_t t = 0; t < kTail + count; ++t) s.rows[part][t] = input(part, begin - kTail + t);
      kernels.convolve({.rows = s.rows[part],
                        .weights = call_.w.conv.data() + part * width_ + head_ * kKdaDim,
                        .stride = 3 * width_,
                        .num_tokens = count,
                        .out = parts[part][0]});
    }
    kernels.normalise(s.q[0], count, 1.0f / std::sqrt(static_cast<float>(kKdaDim)));
    kernels.normalise(s.k[0], count, 1.0f);
    for (int32_t t = 0; t < count; ++t) {
      const int32_t position = begin + t;
      const float* g = s.g[t];
      if (position < sequence_.position) {
        g = ring(position) + 3 * kKdaDim;
      } else {
        kernels.log_decay(call_.in.a.row<const float>(batch_row(position)) + head_ * kKdaDim,
                          call_.w.dt_bias.data() + head_ * kKdaDim, call_.w.a[static_cast<size_t>(head_)], s.g[t]);
      }
      kernels.exponential(g, s.decay[t]);
      s.beta[t] = beta(position);
    }
  }

  // Token by token from the committed position to `end`.
  void run_steps(int32_t end) {
    Scratch& s = scratch_;
    const int32_t first = sequence_.committed, count = end - first;
    CHECK(count <= kMaxSteps, count, " uncommitted and new tokens of a sequence, ", kMaxSteps, " at most");
    prepare(first, count);
    const bool saves = !checkpoints_.empty() && checkpoints_.front().position <= end;
    call_.kernels.steps({.num_tokens = count,
                         .num_commit = std::min(commit_, end) - first,
                         .first_output = sequence_.position - first,
                         .q = s.q[0],
                         .k = s.k[0],
                         .v = s.v[0],
                         .decay = s.decay[0],
                         .beta = s.beta,
                         .decayed_q = s.decayed_q[0],
                         .decayed_k = s.decayed_k[0],
                         .state = unit_,
                         .work = s.state,
                         .checkpoint = saves ? checkpoints_.front().position - first : -1,
                         .checkpoint_state = saves ? unit(checkpoints_.front().pages) : nullptr,
                         .ahead = ahead_,
                         .out = s.out[0]});
    for (int32_t position = sequence_.position; position < end; ++position) finish_row(position, position - first);
  }

  // The new tokens in chunk form, cut at multiples of kKdaChunk positions; the state goes along.
  void run_chunks() {
    float* slabs = scratch_.state;
    call_.kernels.to_slabs(unit_, slabs);
    auto next = checkpoints_.begin();
    while (next != checkpoints_.end() && next->position <= sequence_.position) ++next;  // saved by run_steps
    for (int32_t begin = sequence_.position; begin < end_;) {
      const int32_t end = std::min(end_, static_cast<int32_t>((begin / kKdaChunk + 1) * kKdaChunk));
      run_chunk(begin, end - begin);
      if (next != checkpoints_.end() && next->position == end) call_.kernels.from_slabs(slabs, unit((next++)->pages));
      begin = end;
    }
    call_.kernels.from_slabs(slabs, unit_);
  }

  void run_chunk(int32_t begin, int32_t count) {
    Scratch& s = scratch_;
    prepare(begin, count);
    for (int64_t t = count; t < kKdaChunk; ++t) clear_row(t);
    call_.kernels.relate(s.q[0], s.k[0], s.decay[0], s.relations);
    call_.kernels.apply({.relations = &s.relations,
                         .v = s.v[0],
                         .beta = s.beta,
                         .slabs = s.state,
                         .out = s.out[0],
                         .ahead = rows_from(begin + count)});
    for (int32_t t = 0; t < count; ++t) finish_row(begin + t, t);
  }

  // What the chunk that begins at `position` reads and writes.
  KdaAhead rows_from(int32_t position) const {
    KdaAhead ahead{.num_tokens = std::min<int64_t>(end_ - position, kKdaChunk)};
    const Tensor rows[] = {call_.in.qkv.columns(0, width_),
                           call_.in.qkv.columns(width_, width_),
                           call_.in.qkv.columns(2 * width_, width_),
                           call_.in.a,
                           call_.in.z,
                           call_.out};
    static_assert(std::size(rows) == KdaAhead::kStreams);
    for (int64_t i = 0; i < KdaAhead::kStreams && ahead.num_tokens > 0; ++i) {
      ahead.begin[i] = rows[i].row<const float>(batch_row(position)) + head_ * kKdaDim;
      ahead.stride[i] = rows[i].row_stride;
    }
    return ahead;
  }

  // Row t of the scratch stands for no token: the state passes it unchanged.
  void clear_row(int64_t t) {
    Scratch& s = scratch_;
    for (float* row : {s.q[t], s.k[t], s.v[t]}) std::fill_n(row, kKdaDim, 0.0f);
    std::fill_n(s.decay[t], kKdaDim, 1.0f);
    s.beta[t] = 0;
  }

  // Output of a new token, from row t of the scratch.
  void finish_row(int32_t position, int64_t t) {
    const int64_t r = batch_row(position), column = head_ * kKdaDim;
    call_.kernels.gated_norm(scratch_.out[t], call_.w.o_norm.data(), call_.in.z.row<const float>(r) + column,
                             call_.w.eps, call_.out.row<float>(r) + column);
  }

  // The convolution's last inputs before `position`.
  void gather_tail(int32_t position, float (*tail)[kTail][kKdaDim]) const {
    for (int64_t part = 0; part < 3; ++part) {
      for (int32_t i = 0; i < kTail; ++i) {
        std::memcpy(tail[part][i], input(part, position - static_cast<int32_t>(kTail) + i), sizeof(tail[part][i]));
      }
    }
  }

  // The new tokens, as run_steps left them.
  void write_ring() const {
    for (int32_t position = sequence_.position; position < end_; ++position) {
      const int64_t t = position - sequence_.committed;
      float* to = ring(position);
      for (int64_t part = 0; part < 3; ++part) std::copy_n(input(part, position), kKdaDim, to + part * kKdaDim);
      std::copy_n(scratch_.g[t], kKdaDim, to + 3 * kKdaDim);
      to[4 * kKdaDim] = scratch_.beta[t];
    }
  }

  const Call& call_;
  const SequenceRows& sequence_;
  const int64_t head_;
  const float* const ahead_;
  const int64_t width_;
  Scratch& scratch_;
  float* unit_;
  const int32_t end_, commit_;
  std::span<const StateCheckpoint> checkpoints_;  // that this run gets to
};

void check(const Call& call, const Batch& batch) {
  const KdaShape& shape = call.w.shape;
  const KdaInputs& in = call.in;
  CHECK(shape.dim == kKdaDim && shape.conv == kKdaTaps, "heads of ", shape.dim, ", ", shape.conv, " taps");
  for (const Tensor& x : {in.qkv, in.a, in.b, in.z}) CHECK(x.dtype == DType::kF32, "KDA of ", dtype_name(x.dtype));
  CHECK(in.qkv.cols == 3 * shape.width() && in.a.cols == shape.width() && in.z.cols == shape.width() &&
        in.b.cols == shape.heads);
  CHECK(call.state.unit_bytes >= shape.unit_bytes() && call.state.unit_bytes % kAlignment == 0);
  for (const SequenceRows& s : batch.sequences) {
    CHECK(s.committed <= s.position && s.position - s.committed <= call.state.ring_tokens, "state at ", s.committed,
          ", tokens from ", s.position);
    CHECK(s.commit_all || s.num_tokens <= call.state.ring_tokens, s.num_tokens, " tokens for the ring");
    CHECK(checkpoints_are_valid(s), "checkpoints of tokens from ", s.position);
  }
}

static_assert(kCheckpointTokens % kKdaChunk == 0, "a checkpoint lies at the end of a chunk");

}  // namespace

Tensor kda_attend(const CpuContext& cpu, const KdaInputs& in, const KdaWeights& w, const Batch& batch,
                  const StateLayer& state) {
  const Tensor out = cpu.arena.tensor(DType::kF32, in.qkv.rows, w.shape.width());
  const Call call{
      .kernels = cpu.isa == Isa::kAvx2 ? kKdaAvx2 : kKdaAvx512, .in = in, .w = w, .state = state, .out = out};
  check(call, batch);
  cpu.scratch.reset();
  const std::span<Scratch> scratches = cpu.scratch.array<Scratch>(cpu.pool.size());
  const auto num_sequences = static_cast<int64_t>(batch.sequences.size());
  const int64_t num_tasks = num_sequences * w.shape.heads;
  const auto sequence_of = [&](int64_t task) -> const SequenceRows& {
    return batch.sequences[static_cast<size_t>(task % num_sequences)];
  };
  const int64_t num_threads = std::min<int64_t>(cpu.pool.size(), num_tasks);
  std::atomic<int64_t> next{0};  // tasks differ in length: whoever is free takes one
  cpu.pool.run(num_threads, [&](int64_t, int thread) {
    const FlushDenormals flush;
    for (int64_t task = next++; task < num_tasks; task = next++) {
      const int64_t likely = task + num_threads;
      const uint8_t* ahead =
          likely < num_tasks ? state.unit(sequence_of(likely).state_pages, likely / num_sequences) : nullptr;
      HeadRun(call, sequence_of(task), task / num_sequences, reinterpret_cast<const float*>(ahead),
              scratches[static_cast<size_t>(thread)])
          .run();
    }
  });
  return out;
}

}  // namespace perigee::cpu

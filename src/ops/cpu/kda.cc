#include "ops/cpu/kda.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "ops/cpu/kda_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kPiece = 64;  // tokens prepared together; chunk form: positions [64 i, 64 (i + 1))
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
struct Scratch {
  float q[kPiece][kKdaDim], k[kPiece][kKdaDim], v[kPiece][kKdaDim];
  float g[kPiece][kKdaDim], decay[kPiece][kKdaDim], out[kPiece][kKdaDim];
  float beta[kPiece];
  float tails[2][3][kTail][kKdaDim];
  float state[kState];  // of tokens that do not move it, or in slabs
  KdaChunk chunks[kPiece / kKdaChunk];
  const float* rows[3][kTail + kPiece];
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
  HeadRun(const Call& call, const SequenceRows& sequence, int64_t head, Scratch& scratch)
      : call_(call),
        sequence_(sequence),
        head_(head),
        width_(call.w.shape.width()),
        scratch_(scratch),
        unit_(unit(sequence.state_pages)),
        end_(sequence.position + sequence.num_tokens),
        commit_(sequence.commit_all ? end_ : sequence.position) {
    const int32_t at = sequence.checkpoint_position;
    if (at > sequence.committed && at <= commit_) checkpoint_ = unit(sequence.checkpoint_pages);
  }

  void run() {
    const int32_t steps_end = sequence_.commit_all ? sequence_.position : end_;
    if (steps_end > sequence_.committed) run_steps(steps_end);
    if (end_ > steps_end) run_chunks();
    // Inputs are read where they lie until here.
    if (checkpoint_ != nullptr) gather_tail(sequence_.checkpoint_position, scratch_.tails[0]);
    gather_tail(commit_, scratch_.tails[1]);
    if (checkpoint_ != nullptr) std::memcpy(checkpoint_ + kState, scratch_.tails[0], sizeof(scratch_.tails[0]));
    std::memcpy(unit_ + kState, scratch_.tails[1], sizeof(scratch_.tails[1]));
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

  // q, k, v, decay and beta of `count` tokens from position `begin` on, at index `at` of the scratch's rows.
  void prepare(int32_t begin, int32_t count, int64_t at) {
    Scratch& s = scratch_;
    const KdaKernels& kernels = call_.kernels;
    float(*parts[3])[kKdaDim] = {s.q, s.k, s.v};
    for (int64_t part = 0; part < 3; ++part) {
      for (int32_t t = 0; t < kTail + count; ++t) s.rows[part][t] = input(part, begin - kTail + t);
      kernels.convolve({.rows = s.rows[part],
                        .weights = call_.w.conv.data() + part * width_ + head_ * kKdaDim,
                        .stride = 3 * width_,
                        .num_tokens = count,
                        .out = parts[part][at]});
    }
    kernels.normalise(s.q[at], count, 1.0f / std::sqrt(static_cast<float>(kKdaDim)));
    kernels.normalise(s.k[at], count, 1.0f);
    for (int32_t t = 0; t < count; ++t) {
      const int32_t position = begin + t;
      const float* g = s.g[at + t];
      if (position < sequence_.position) {
        g = ring(position) + 3 * kKdaDim;
      } else {
        kernels.log_decay(call_.in.a.row<const float>(batch_row(position)) + head_ * kKdaDim,
                          call_.w.dt_bias.data() + head_ * kKdaDim, call_.w.a[static_cast<size_t>(head_)], s.g[at + t]);
      }
      kernels.exponential(g, s.decay[at + t]);
      s.beta[at + t] = beta(position);
    }
  }

  // Token by token from the committed position to `end`.
  void run_steps(int32_t end) {
    Scratch& s = scratch_;
    const int32_t first = sequence_.committed, count = end - first;
    CHECK(count <= kPiece, count, " uncommitted and new tokens of a sequence, ", kPiece, " at most");
    prepare(first, count, 0);
    call_.kernels.steps({.num_tokens = count,
                         .num_commit = std::min(commit_, end) - first,
                         .first_output = sequence_.position - first,
                         .q = s.q[0],
                         .k = s.k[0],
                         .v = s.v[0],
                         .decay = s.decay[0],
                         .beta = s.beta,
                         .state = unit_,
                         .work = s.state,
                         .checkpoint = checkpoint_ != nullptr ? sequence_.checkpoint_position - first : -1,
                         .checkpoint_state = checkpoint_,
                         .out = s.out[0]});
    for (int32_t position = sequence_.position; position < end; ++position) finish_row(position, position - first);
  }

  // The new tokens in chunk form; the state goes along.
  void run_chunks() {
    Scratch& s = scratch_;
    call_.kernels.to_slabs(unit_, s.state);
    for (int32_t begin = sequence_.position; begin < end_;) {
      int32_t end = std::min(end_, static_cast<int32_t>((begin / kPiece + 1) * kPiece));
      if (checkpoint_ != nullptr && begin < sequence_.checkpoint_position) {
        end = std::min(end, sequence_.checkpoint_position);
      }
      run_piece(begin, end - begin);
      if (checkpoint_ != nullptr && end == sequence_.checkpoint_position) {
        call_.kernels.from_slabs(s.state, checkpoint_);
      }
      begin = end;
    }
    call_.kernels.from_slabs(s.state, unit_);
  }

  void run_piece(int32_t begin, int32_t count) {
    Scratch& s = scratch_;
    const int64_t lead = begin % kKdaChunk, num_chunks = (lead + count + kKdaChunk - 1) / kKdaChunk;
    prepare(begin, count, lead);
    for (int64_t t = 0; t < lead; ++t) clear_row(t);
    for (int64_t t = lead + count; t < num_chunks * kKdaChunk; ++t) clear_row(t);
    for (int64_t c = 0; c < num_chunks; ++c) {
      call_.kernels.relate(s.q[c * kKdaChunk], s.k[c * kKdaChunk], s.decay[c * kKdaChunk], s.chunks[c]);
    }
    call_.kernels.apply(
        {.num_chunks = num_chunks, .chunks = s.chunks, .v = s.v[0], .beta = s.beta, .slabs = s.state, .out = s.out[0]});
    for (int32_t t = 0; t < count; ++t) finish_row(begin + t, lead + t);
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
  const int64_t head_, width_;
  Scratch& scratch_;
  float* unit_;
  float* checkpoint_ = nullptr;  // unit to write the state at checkpoint_position to, if this run gets there
  const int32_t end_, commit_;
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
  }
}

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
  std::atomic<int64_t> next{0};  // tasks differ in length: whoever is free takes one
  cpu.pool.run(std::min<int64_t>(cpu.pool.size(), num_tasks), [&](int64_t, int thread) {
    const FlushDenormals flush;
    for (int64_t task = next++; task < num_tasks; task = next++) {
      const SequenceRows& sequence = batch.sequences[static_cast<size_t>(task % num_sequences)];
      HeadRun(call, sequence, task / num_sequences, scratches[static_cast<size_t>(thread)]).run();
    }
  });
  return out;
}

}  // namespace perigee::cpu

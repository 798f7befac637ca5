// CudaOps: Kimi Delta Attention.
#include <algorithm>

#include "ops/cuda/backend.h"
#include "ops/cuda/kda/kda.h"

namespace perigee {
namespace {

constexpr int64_t kLargest = int64_t{1} << 31;     // bytes: strides are 32-bit numbers in the kernels
constexpr int32_t kMostTokens = int32_t{1} << 21;  // of a sequence: kda_quotient

void check_shapes(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  const KdaShape& s = w.shape;
  CHECK(s.dim == kKdaDim && s.conv == kKdaTaps, "heads of ", s.dim, ", ", s.conv, " taps");
  for (const Tensor& x : {in.qkv, in.a, in.z})
    CHECK(x.dtype == DType::kF32 && x.row_stride % 4 == 0, "KDA of ", dtype_name(x.dtype));
  CHECK(in.b.dtype == DType::kBF16 && in.b.cols == s.heads && in.qkv.cols == 3 * s.width() && in.a.cols == s.width() &&
        in.z.cols == s.width());
  CHECK(state.unit_bytes >= s.unit_bytes() && state.unit_bytes % 16 == 0 && state.page_bytes % 16 == 0);
  CHECK(state.ring_tokens <= kKdaMaxRing, "a ring of ", state.ring_tokens, " tokens");
  CHECK(state.page_bytes < kLargest && state.ring_slot_bytes < kLargest && in.qkv.row_stride < kLargest);
  for (const SequenceRows& rows : batch.sequences)
    CHECK(rows.position + rows.num_tokens < kMostTokens && checkpoints_are_valid(rows), "tokens from ", rows.position);
  CHECK(batch.device != nullptr && batch.device->committed != nullptr);
}

static_assert(kCheckpointTokens % kKdaChunk == 0, "a checkpoint lies at the end of a chunk");

}  // namespace

// Of few rows, decay and output gate, two products of the same shape, are one launch.
Tensor CudaOps::kda(const Tensor& x, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  const auto& decay = static_cast<const CudaMatrix&>(*w.f_b.packed);
  const auto& gate = static_cast<const CudaMatrix&>(*w.g_b.packed);
  if (!choose_joined_kda_gates(decay.format, gate.format, x.rows)) return Ops::kda(x, w, batch, state);
  const int64_t dim = w.shape.dim, width = w.shape.width();
  const Tensor gates = linear(x, w.gates, DType::kBF16);  // f_a | g_a | b
  const Tensor qkv = linear(x, w.qkv, DType::kF32);
  const Tensor a_and_z = arena_.tensor(DType::kF32, 2 * x.rows, width);
  gemm({.weight = decay.data.data(),
        .weight_stride = gate.data.data() - decay.data.data(),
        .x = gates.row<const uint16_t>(0),
        .x_stride = gates.row_stride,
        .x_head = dim,
        .y = a_and_z.data,
        .y_stride = width,
        .y_head = x.rows * width,
        .rows = static_cast<int32_t>(x.rows),
        .heads = 2,
        .out = static_cast<int32_t>(width),
        .in = static_cast<int32_t>(dim),
        .chunks = static_cast<int32_t>(decay.padded_in / 128),
        .output = GemmOutput::kF32},
       "kda gates");
  const KdaInputs in{.qkv = qkv,
                     .a = a_and_z.row_range(0, x.rows),
                     .b = gates.columns(2 * dim, w.shape.heads),
                     .z = a_and_z.row_range(x.rows, x.rows)};
  return kda_attend(in, w, batch, state);
}

Tensor CudaOps::kda_attend(const KdaInputs& in, const KdaWeights& w, const Batch& batch, const StateLayer& state) {
  check_shapes(in, w, batch, state);
  const Tensor y = arena_.tensor(DType::kBF16, in.qkv.rows, w.shape.width());
  const KdaCall call{.qkv = in.qkv,
                     .a = in.a,
                     .b = in.b,
                     .z = in.z,
                     .y = y,
                     .conv = w.conv.data(),
                     .rate = w.a.data(),
                     .dt_bias = w.dt_bias.data(),
                     .o_norm = w.o_norm.data(),
                     .eps = w.eps,
                     .heads = static_cast<int32_t>(w.shape.heads),
                     .num_sequences = static_cast<int32_t>(batch.sequences.size()),
                     .state = state,
                     .sequences = *batch.device};
  check(kda_step(call, stream()), "kda_step");
  run_prefills(call, batch);
  return y;
}

// Prefills in chunk form, kKdaMaxChunks at a time: while the state goes through some, the relations of the next are
// computed, in the other half of the scratch memory, and those before them get their outputs.
void CudaOps::run_prefills(const KdaCall& call, const Batch& batch) {
  // Scratch memory by a bound that grows with rows and prefills alone, so that the largest step of a warm-up has the
  // most: at least the sum of kda_max_chunks() of prefills whose tokens are all rows.
  const int64_t prefills =
      std::count_if(batch.sequences.begin(), batch.sequences.end(), [](const SequenceRows& s) { return s.commit_all; });
  if (prefills == 0) return;
  const int64_t slots = call.y.rows / kKdaChunk + prefills * kda_max_chunks(kKdaChunk - 1);
  const ArenaScope scope(arena_);
  const auto bytes = static_cast<size_t>(kda_scratch_bytes(std::min<int64_t>(slots, kKdaMaxChunks), call.heads));
  void* const scratch[] = {arena_.allocate(bytes), slots > kKdaMaxChunks ? arena_.allocate(bytes) : nullptr};
  float* const out = arena_.array<float>(call.y.rows * call.y.cols).data();
  KdaPieces pieces{.scratch = scratch[0], .out = out}, carried{.out = out}, finished{.out = out};
  const auto run = [&] {
    check(kda_relate(call, pieces, finished, stream()), "kda_relate");
    check(kda_carry(call, pieces, stream()), "kda_carry");
    finished = carried;
    carried = pieces;
    pieces.count = pieces.num_slots = 0;
    pieces.beside_carry = true;
    pieces.scratch = scratch[pieces.scratch == scratch[0] ? 1 : 0];
  };
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    if (!batch.sequences[i].commit_all) continue;
    const auto chunks = static_cast<int32_t>(kda_max_chunks(batch.sequences[i].num_tokens));
    for (int32_t first = 0; first < chunks;) {
      const int32_t count = std::min(chunks - first, kKdaMaxChunks - pieces.num_slots);
      pieces.pieces[pieces.count++] = {.sequence = static_cast<int32_t>(i),
                                       .first_chunk = first,
                                       .num_chunks = count,
                                       .first_slot = pieces.num_slots};
      pieces.num_slots += count;
      first += count;
      if (pieces.num_slots == kKdaMaxChunks) run();
    }
  }
  if (pieces.count > 0) run();
  check(kda_relate(call, pieces, finished, stream()), "kda_finish");
  pieces.beside_carry = false;
  check(kda_relate(call, pieces, carried, stream()), "kda_finish");
}

}  // namespace perigee

// Kimi Delta Attention on one GPU, 32 heads unless said: µs of CudaOps::kda_attend for a layer (convolution, gates,
// recurrence, output norm, ring), cold memory: every call of a captured graph works on another layer's states, several
// times the L2 together. A figure is the median of 11 replays, divided by the calls of one.
//
//   cuda_kda_bench [substring ...]     rows whose name holds one of them
//
// Bytes counted, each once. Step: the state and the convolution's tail read and written, the ring written and read,
// inputs, outputs. Prefill: inputs and outputs.
#include "bench/cuda_timing.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/kda/kda.h"

namespace perigee {
namespace {

using bench::must, bench::upload;

constexpr int kRing = 4;

// Random numbers in [low, high).
__global__ void fill(float* data, int64_t count, float low, float high) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    data[i] = low + (high - low) * static_cast<float>(z >> 40) * 0x1p-24f;
  }
}

float* filled(int64_t count, float low, float high) {
  float* data = nullptr;
  must(cudaMalloc(&data, count * sizeof(float)));
  fill<<<1024, 256>>>(data, count, low, high);
  return data;
}

struct Row {
  const char* name;
  int batch, tokens, replayed;  // sequences, new tokens of each, tokens of each that move the state first
  bool prefill;
  int heads = 32;

  int64_t width() const { return int64_t{heads} * kKdaDim; }
};

// Inputs, weights and states of one row.
class World {
 public:
  World(const Row& r, CudaOps& ops) : row_(r), ops_(ops) {
    const int64_t n = static_cast<int64_t>(r.batch) * r.tokens, width = r.width();
    const auto tensor = [&](float* data, int64_t cols) {
      return Tensor{.data = data, .dtype = DType::kF32, .rows = n, .cols = cols, .row_stride = cols};
    };
    in_.qkv = tensor(filled(n * 3 * width, -2, 2), 3 * width);
    in_.a = tensor(filled(n * width, -2, 2), width);
    in_.z = tensor(filled(n * width, -2, 2), width);
    in_.b = {
        .data = filled(n * r.heads, 0, 0), .dtype = DType::kBF16, .rows = n, .cols = r.heads, .row_stride = r.heads};
    weights_.shape.heads = r.heads;
    const auto vector = [](int64_t count, float low, float high) {
      return VectorWeight(filled(count, low, high), static_cast<size_t>(count), nullptr);
    };
    weights_.conv = vector(4 * 3 * width, -0.6f, 0.6f);
    weights_.a = vector(r.heads, 1, 16);
    weights_.dt_bias = vector(width, -7, -2);
    weights_.o_norm = vector(kKdaDim, 0.5f, 1.5f);
    place_states();
    place_batch();
  }

  void call(int layer) {
    state_.first_unit = layer * row_.heads;
    ops_.begin_step();
    ops_.kda_attend(in_, weights_, batch_, state_);
  }
  int layers() const { return layers_; }

 private:
  void place_states() {
    const KdaShape& shape = weights_.shape;
    layers_ = row_.prefill ? 2 : std::clamp(640 / row_.batch, 4, 80);
    const int64_t units = static_cast<int64_t>(layers_) * row_.heads * row_.batch;
    state_ = {.page_bytes = shape.unit_bytes() * row_.heads,
              .unit_bytes = shape.unit_bytes(),
              .units_per_page = row_.heads,
              .ring_token_bytes = shape.ring_token_floats() * 4,
              .ring_tokens = kRing};
    state_.ring_slot_bytes = state_.ring_token_bytes * kRing * row_.heads * layers_;
    state_.base = reinterpret_cast<uint8_t*>(filled(units * shape.unit_bytes() / 4, -0.1f, 0.1f));
    state_.ring = reinterpret_cast<uint8_t*>(filled(state_.ring_slot_bytes / 4 * row_.batch, -0.5f, -0.01f));
  }

  void place_batch() {
    constexpr int32_t kPosition = 1021;
    std::vector<int32_t> first_row, lengths, committed, commit, pages, slots, row_sequence;
    for (int s = 0; s < row_.batch; ++s) {
      const int32_t position = row_.prefill ? 0 : kPosition;
      sequences_.push_back({.first_row = s * row_.tokens, .num_tokens = row_.tokens, .commit_all = row_.prefill});
      first_row.push_back(s * row_.tokens);
      lengths.push_back(position + row_.tokens);
      committed.push_back(position - row_.replayed);
      commit.push_back(row_.prefill ? lengths.back() : position);
      slots.push_back(s);
      for (int layer = 0; layer < layers_; ++layer) pages.push_back(layer * row_.batch + s);
      row_sequence.insert(row_sequence.end(), static_cast<size_t>(row_.tokens), s);
    }
    first_row.push_back(row_.batch * row_.tokens);
    device_ = {.first_row = upload(first_row),
               .lengths = upload(lengths),
               .row_sequence = upload(row_sequence),
               .state_pages = upload(pages),
               .state_width = layers_,
               .slots = upload(slots),
               .committed = upload(committed),
               .commit = upload(commit),
               .first_checkpoint = upload(std::vector<int32_t>(static_cast<size_t>(row_.batch) + 1, 0))};
    batch_.sequences = sequences_;
    batch_.device = &device_;
  }

  const Row row_;
  CudaOps& ops_;
  KdaInputs in_;
  KdaWeights weights_;
  StateLayer state_;
  DeviceSequences device_;
  std::vector<SequenceRows> sequences_;
  Batch batch_;
  int layers_ = 0;
};

void measure(const Row& r, CudaOps& ops) {
  World world(r, ops);
  must(cudaDeviceSynchronize());
  const double us = bench::time_calls(ops.stream(), world.layers(), [&](int layer) { world.call(layer); });
  const KdaShape shape{.heads = r.heads};
  const double row_bytes = r.width() * (5 * 4 + 2.0), ring_bytes = shape.ring_token_floats() * 4.0 * r.heads;
  double bytes = r.batch * r.tokens * row_bytes;
  if (!r.prefill) bytes += r.batch * (2.0 * shape.unit_bytes() * r.heads + (r.tokens + r.replayed) * ring_bytes);
  bench::print_row(r.name, us, bytes);
}

int run() {
  must(cudaSetDevice(0));
  CudaOps ops(CudaOptions{});
  for (const Row& r :
       {Row{"step B1", 1, 1, 1, false}, Row{"step B16", 16, 1, 1, false}, Row{"step B64", 64, 1, 1, false},
        Row{"step B256", 256, 1, 1, false}, Row{"verify B1 q4, 3 replayed", 1, 4, 3, false},
        Row{"verify B64 q4, 3 replayed", 64, 4, 3, false}, Row{"prefill 1 x 512", 1, 512, 0, true},
        Row{"prefill 1 x 2048", 1, 2048, 0, true}, Row{"prefill 1 x 8192", 1, 8192, 0, true},
        Row{"prefill 8 x 1024", 8, 1024, 0, true}, Row{"prefill 1 x 8192, 16 heads", 1, 8192, 0, true, 16},
        Row{"prefill 1 x 8192, 8 heads", 1, 8192, 0, true, 8}})
    if (bench::wanted(r.name)) measure(r, ops);
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  perigee::bench::filters.assign(argv + 1, argv + argc);
  return perigee::run();
}

// MLA decode on one GPU: microseconds of attention plus combine for a layer, cold memory. Every call of a captured
// graph reads other pages of a pool several times the L2; a figure is the median of 11 replays, divided by the calls of
// one.
//
//   cuda_mla_bench [substring ...]     rows whose name holds one of them
//
// Bytes counted: keys once, queries and outputs not.
#include "base/rng.h"
#include "bench/cuda_timing.h"
#include "ops/cuda/mla/mla_decode.h"
#include "ops/cuda/mla/mla_prefill.h"
#include "ops/cuda/mla/mla_write.h"

namespace perigee {
namespace {

constexpr int64_t kPoolBytes = 6ll << 30;

using bench::must, bench::upload, bench::wanted;

int64_t row_bytes_of(LatentFormat format) {
  return latent_row_bytes(format, kMlaLatent, kMlaWidth - kMlaLatent);
}

// Finite random bytes: bf16 in about [-2, 2] or any e4m3 below 2.
__global__ void fill(uint32_t* data, int64_t words, bool fp8) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    const uint32_t x = static_cast<uint32_t>(z >> 32);
    data[i] = fp8 ? x & 0xBFBFBFBFu : (x & 0x807F807Fu) | 0x3F003F00u;
  }
}

struct Row {
  int heads, batch, length, query;
  LatentFormat format;
  int capability;      // 0: the device's
  bool fixed = false;  // lists cut at fixed places
};

std::string name_of(const Row& r) {
  char text[96];
  std::snprintf(text, sizeof text, "%s h%d B%d S%d q%d%s%s", latent_format_name(r.format), r.heads, r.batch, r.length,
                r.query, r.capability ? " portable" : "", r.fixed ? " fixed" : "");
  return text;
}

MlaDecodeConfig config_of(const Row& r) {
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  MlaDecodeShape shape;
  shape.heads = r.heads, shape.max_sequences = r.batch, shape.max_tokens = r.batch * r.query, shape.max_query = r.query;
  shape.format = r.format;
  shape.lists = r.fixed ? MlaLists::kFixed : MlaLists::kBalanced;
  shape.max_pieces = static_cast<int64_t>(r.batch) * ((r.heads * r.query + 31) / 32) * mla_pieces((r.length + 63) / 64);
  shape.multiprocessors = device.multiProcessorCount;
  shape.compute_capability = r.capability ? r.capability : device.major * 10 + device.minor;
  return mla_decode_config(shape);
}

void measure(const Row& r, uint8_t* pool, uint16_t* q, uint16_t* out, float* lse, cudaStream_t stream) {
  const MlaDecodeConfig config = config_of(r);
  const int64_t page_bytes = 64 * row_bytes_of(r.format);
  const int width = (r.length + 63) / 64;
  const int64_t pages = kPoolBytes / page_bytes, used = static_cast<int64_t>(width) * r.batch;
  const int calls = static_cast<int>(std::clamp<int64_t>(pages / used, 1, 40));
  std::vector<int32_t> order(pages), first_row(r.batch + 1), lengths(r.batch, r.length);
  for (int64_t i = 0; i < pages; ++i) order[i] = static_cast<int32_t>(i);
  for (int64_t i = pages - 1; i > 0; --i) std::swap(order[i], order[random_u64(7, i) % (i + 1)]);
  for (int s = 0; s <= r.batch; ++s) first_row[s] = s * r.query;
  int32_t* table = upload(order);
  MlaBatch batch;
  batch.first_row = upload(first_row), batch.lengths = upload(lengths);
  batch.sequences = r.batch, batch.table_width = width;
  MlaDecodeArgs args;
  args.q = q, args.kv = pool, args.page_bytes = page_bytes, args.softmax_scale = 0.07f, args.out = out, args.lse = lse;
  void* workspace = nullptr;
  must(cudaMalloc(&workspace, config.workspace_bytes()));
  must(mla_plan(config, batch, workspace, stream));
  must(cudaStreamSynchronize(stream));
  const double us = bench::time_calls(stream, calls, [&](int i) {
    batch.block_table = table + i * used;
    must(mla_decode(config, batch, args, workspace, stream));
  });
  const double bytes = static_cast<double>(r.batch) * r.length * page_bytes / 64;
  const double flop = 2.0 * r.batch * r.heads * r.query * r.length * (kMlaWidth + kMlaLatent);
  bench::print_row(name_of(r), us, bytes, flop, config.name());
  must(cudaFree(workspace)), must(cudaFree(table));
  must(cudaFree(const_cast<int32_t*>(batch.first_row))), must(cudaFree(const_cast<int32_t*>(batch.lengths)));
}

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles}) {
    for (const int heads : {8, 16, 32, 64, 128}) all.push_back({heads, 1, 80000, 1, format, 0});
    all.push_back({16, 1, 1024, 1, format, 0});
    for (const int heads : {8, 64}) {
      all.push_back({heads, 1, 1024, 1, format, 0});
      all.push_back({heads, 1, 16384, 1, format, 0});
      all.push_back({heads, 64, 1024, 1, format, 0});
      all.push_back({heads, 64, 16384, 1, format, 0});
    }
    all.push_back({8, 64, 4096, 4, format, 0});
    all.push_back({64, 8, 16384, 4, format, 0});
    all.push_back({128, 64, 4096, 1, format, 0});
    all.push_back({64, 1, 100000, 64, format, 0});
    if (format != LatentFormat::kF8Tiles)
      for (const int heads : {16, 32, 64}) all.push_back({heads, 1, 80000, 1, format, 80});
    for (const int heads : {8, 64}) {
      all.push_back({heads, 1, 80000, 1, format, 0, true});
      all.push_back({heads, 64, 16384, 1, format, 0, true});
    }
    for (const int length : {1024, 8192}) {
      for (const int batch : {1, 64}) all.push_back({16, batch, length, 1, format, 0, true});
      all.push_back({16, 1, length, 256, format, 0, true});
    }
  }
  return all;
}

// `length` new tokens of a prompt after `context` cached ones, causal, expanded form.
struct PrefillRow {
  int heads, nope, value, length, context = 0;
};

// Queries, keys and outputs lie in the pool.
void measure_prefill(const PrefillRow& r, uint8_t* pool, cudaStream_t stream) {
  const auto [heads, nope, value, length, context] = r;
  const int keys = context + length;
  cudaDeviceProp device{};
  must(cudaGetDeviceProperties(&device, 0));
  const PrefillKernel kernel = choose_mla_prefill(nope, value, device.major * 10 + device.minor);
  const std::string name = "prefill " + std::to_string(nope + 64) + "/" + std::to_string(value) + " h" +
                           std::to_string(heads) + " S" + std::to_string(length) +
                           (context > 0 ? " on " + std::to_string(context) : "");
  if (!wanted(name)) return;
  MlaPrefillArgs a;
  a.heads = heads, a.nope = nope, a.value = value, a.sequences = 1, a.max_query = length, a.keys = keys;
  a.softmax_scale = 0.07f;
  const int32_t* rows = upload(std::vector<int32_t>{0, length, 0, keys});
  a.first_query = rows, a.first_key = rows + 2;
  const int64_t q_bytes = 2ll * length * heads * (nope + 64), up_bytes = 2ll * keys * heads * (nope + value);
  a.q = pool, a.up = pool + q_bytes, a.k_rope = pool + q_bytes + up_bytes;
  a.out = pool + q_bytes + up_bytes + keys * 128ll;
  const double us = bench::time_calls(stream, 2, [&](int) { must(mla_prefill(kernel, a, stream)); });
  const double pairs = 0.5 * length * length + 1.0 * length * context;
  const double flop = 2.0 * heads * pairs * (nope + 64 + value);
  bench::print_row(name, us, 0, flop, perigee::name(kernel));
  must(cudaFree(const_cast<int32_t*>(rows)));
}

// The cache write of `tokens` tokens of as many sequences; every call writes other pages.
void measure_write(int tokens, LatentFormat format, uint8_t* pool, cudaStream_t stream) {
  constexpr int kCalls = 8, heads = 64;
  const std::string name = std::string(format == LatentFormat::kBF16 ? "" : latent_format_name(format)) +
                           (format == LatentFormat::kBF16 ? "" : " ") + "write h" + std::to_string(heads) + ", " +
                           std::to_string(tokens) + " tokens";
  if (!wanted(name)) return;
  std::vector<int32_t> pages(tokens * kCalls), positions(tokens);
  for (int i = 0; i < tokens * kCalls; ++i) pages[i] = i;
  for (int i = 0; i < tokens; ++i) positions[i] = i % 64;
  MlaWriteArgs a;
  a.tokens = tokens, a.heads = heads, a.nope = 128, a.kv_stride = kMlaWidth, a.eps = 1e-6f;
  int32_t* all_pages = upload(pages);
  a.positions = upload(positions), a.norm = upload(std::vector<float>(kMlaLatent, 1.0f));
  a.inv_freq = upload(std::vector<float>(32, 0.01f)), a.page_bytes = 64 * row_bytes_of(format), a.format = format;
  const int64_t kv_bytes = 4ll * tokens * kMlaWidth, q_bytes = 2ll * tokens * heads * 192;
  uint8_t* inputs = pool + (5ll << 30);
  const double us = bench::time_calls(stream, kCalls, [&](int i) {
    a.pages = all_pages + i * tokens, a.cache = pool;
    a.kv = reinterpret_cast<const float*>(inputs + i * (kv_bytes + q_bytes)),
    a.q = inputs + i * (kv_bytes + q_bytes) + kv_bytes;
    must(mla_write(a, stream));
  });
  const double bytes = tokens * (kMlaWidth * 4.0 + row_bytes_of(format) + heads * 64 * 4.0);
  bench::print_row(name, us, bytes);
}

int run() {
  cudaStream_t stream;
  must(cudaStreamCreate(&stream));
  uint8_t* pool = nullptr;
  uint16_t *q = nullptr, *out = nullptr;
  float* lse = nullptr;
  constexpr int64_t kRows = 64 * 128;  // of the largest batch: tokens * heads
  must(cudaMalloc(&pool, kPoolBytes));
  must(cudaMalloc(&q, kRows * kMlaWidth * 2)), must(cudaMalloc(&out, kRows * kMlaLatent * 2));
  must(cudaMalloc(&lse, kRows * 4));
  must(mla_decode_prepare());
  fill<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(q), kRows * kMlaWidth / 2, false);
  int filled = -1;
  for (const Row& r : rows()) {
    if (!wanted(name_of(r))) continue;
    const bool fp8 = r.format != LatentFormat::kBF16;
    if (filled != fp8) fill<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(pool), kPoolBytes / 4, fp8);
    filled = fp8;
    measure(r, pool, q, out, lse, stream);
  }
  must(mla_prefill_prepare());
  fill<<<1024, 256, 0, stream>>>(reinterpret_cast<uint32_t*>(pool), kPoolBytes / 4, false);
  for (const PrefillRow& r :
       {PrefillRow{8, 128, 128, 8192}, PrefillRow{64, 128, 128, 4096}, PrefillRow{64, 128, 128, 16384},
        PrefillRow{64, 128, 128, 2048, 14336}, PrefillRow{20, 192, 256, 8192}, PrefillRow{20, 192, 256, 2048, 14336}})
    measure_prefill(r, pool, stream);
  for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles})
    for (const int tokens : {1, 64, 1024}) measure_write(tokens, format, pool, stream);
  return 0;
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  perigee::bench::filters.assign(argv + 1, argv + argc);
  return perigee::run();
}

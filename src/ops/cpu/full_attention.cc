#include "ops/cpu/full_attention.h"

#include <algorithm>
#include <vector>

#include "ops/cpu/full_kernels.h"
#include "ops/cpu/mla_kernels.h"

namespace perigee::cpu {
namespace {

constexpr int64_t kQueries = 32;  // of a task, about

struct Call {
  const FullKernels& kernels;
  const Tensor& q;
  const FullShape& shape;
  const FullLayer& cache;
  Tensor out;
  int64_t group() const { return shape.heads / shape.kv_heads; }
  int64_t padded() const { return round_up(shape.dim, kPanel); }
  int64_t scratch_floats() const { return (2 * kRowsOfBlock + 2 * (kQueries + group())) * padded(); }
};

// Tokens [first, first + count) of one sequence that meet one head's keys.
struct Task {
  const SequenceRows* sequence = nullptr;
  int64_t head = 0, first = 0, count = 0;
};

std::vector<Task> tasks_of(const Batch& batch, const Call& call) {
  const int64_t tile = std::max<int64_t>(kQueries / call.group(), 1);
  std::vector<Task> tasks;
  for (const SequenceRows& s : batch.sequences)
    for (int64_t first = 0; first < s.num_tokens; first += tile)
      for (int64_t head = 0; head < call.shape.kv_heads; ++head)
        tasks.push_back({&s, head, first, std::min<int64_t>(tile, s.num_tokens - first)});
  return tasks;
}

void widen(const Call& call, const uint8_t* rows, int64_t count, float* out) {
  if (call.cache.dtype == DType::kBF16)
    call.kernels.widen_bf16(reinterpret_cast<const uint16_t*>(rows), count, call.shape.dim, call.padded(), out);
  else
    call.kernels.widen_f8(rows, count, call.shape.dim, call.padded(), out);
}

// `scratch`: rows are zero beyond their first `dim` floats.
void run(const Call& call, const Task& task, float* scratch) {
  const SequenceRows& s = *task.sequence;
  const int64_t dim = call.shape.dim, padded = call.padded(), group = call.group(), num = task.count * group;
  float* keys = scratch;
  float* values = keys + kRowsOfBlock * padded;
  float* rows = values + kRowsOfBlock * padded;
  std::vector<FullQuery> queries(static_cast<size_t>(num));
  const auto row_of = [&](const Tensor& t, int64_t i) {  // of query i
    return t.row<float>(s.first_row + task.first + i / group) + (task.head * group + i % group) * dim;
  };
  for (int64_t i = 0; i < num; ++i) {
    float* q = rows + 2 * i * padded;
    std::copy_n(row_of(call.q, i), dim, q);
    queries[static_cast<size_t>(i)] = {.q = q, .out = q + padded};
  }
  const int64_t end = s.position + task.first + task.count;
  for (int64_t begin = 0; begin < end; begin += kRowsOfBlock) {
    const int32_t page = s.pages[begin / kRowsOfBlock];
    const int64_t count = std::min<int64_t>(kRowsOfBlock, end - begin);
    widen(call, call.cache.keys(page, task.head), count, keys);
    widen(call, call.cache.values(page, task.head), count, values);
    for (int64_t i = 0; i < num; ++i) {
      const int64_t seen = std::min(count, s.position + task.first + i / group + 1 - begin);
      if (seen > 0)
        call.kernels.attend(queries[static_cast<size_t>(i)], keys, values, seen, padded,
                            call.shape.softmax_scale * kLog2E);
    }
  }
  for (int64_t i = 0; i < num; ++i) {
    const FullQuery& query = queries[static_cast<size_t>(i)];
    float* out = row_of(call.out, i);
    for (int64_t j = 0; j < dim; ++j) out[j] = query.out[j] / query.sum;
  }
}

void check(const FullLayer& cache, const Batch& batch) {
  CHECK(cache.dtype == DType::kBF16 || cache.dtype == DType::kF8E4M3, "the cpu backend keeps bf16 or e4m3, not ",
        dtype_name(cache.dtype));
  CHECK(!batch.is_shared(), "keys and values of heads are not shared by ranks");
}

}  // namespace

void write_full(const CpuContext& cpu, const Tensor& k, const Tensor& v, const Batch& batch, const FullLayer& cache) {
  check(cache, batch);
  CHECK(k.dtype == DType::kF32 && k.cols == cache.heads * cache.dim && v.cols == k.cols, k.cols);
  const auto store = [&](const Tensor& x, int64_t row, int64_t head, uint8_t* block, int64_t at) {
    const float* from = x.row<const float>(row) + head * cache.dim;
    if (cache.dtype == DType::kBF16) {
      auto* to = reinterpret_cast<uint16_t*>(block) + at * cache.dim;
      for (int64_t i = 0; i < cache.dim; ++i) to[i] = f32_to_bf16(from[i]);
    } else {
      for (int64_t i = 0; i < cache.dim; ++i) block[at * cache.dim + i] = f32_to_f8e4m3(from[i]);
    }
  };
  for (const SequenceRows& s : batch.sequences)
    cpu.pool.run(s.num_tokens, [&](int64_t t, int) {
      const int64_t position = s.position + t, row = s.first_row + t;
      const int32_t page = s.pages[position / kRowsOfBlock];
      for (int64_t head = 0; head < cache.heads; ++head) {
        store(k, row, head, cache.keys(page, head), position % kRowsOfBlock);
        store(v, row, head, cache.values(page, head), position % kRowsOfBlock);
      }
    });
}

Tensor full_attend(const CpuContext& cpu, const Tensor& q, const FullShape& shape, const Batch& batch,
                   const FullLayer& cache) {
  check(cache, batch);
  CHECK(q.dtype == DType::kF32 && q.cols == shape.heads * shape.dim && cache.heads == shape.kv_heads &&
            cache.dim == shape.dim,
        q.cols, " columns of queries");
  const Call call{.kernels = cpu.isa == Isa::kAvx2 ? kFullAvx2 : kFullAvx512,
                  .q = q,
                  .shape = shape,
                  .cache = cache,
                  .out = cpu.arena.tensor(DType::kF32, q.rows, q.cols)};
  cpu.scratch.reset();
  const std::span<float> scratch = cpu.scratch.array<float>(cpu.pool.size() * call.scratch_floats());
  std::fill(scratch.begin(), scratch.end(), 0.0f);
  const std::vector<Task> tasks = tasks_of(batch, call);
  cpu.pool.run(std::ssize(tasks), [&](int64_t i, int thread) {
    run(call, tasks[static_cast<size_t>(i)], scratch.data() + thread * call.scratch_floats());
  });
  return call.out;
}

}  // namespace perigee::cpu

#include "exec/cuda/decode_graphs.h"

#include <algorithm>
#include <numeric>

#include "exec/cuda/capture_graph.h"

namespace perigee {
namespace {

// Few rows cost by the row, many by the eight.
std::vector<int32_t> bucket_sizes(int32_t max_rows) {
  std::vector<int32_t> sizes;
  for (int32_t rows = 1; rows < max_rows;) {
    sizes.push_back(rows);
    rows += rows < 4 ? 1 : rows < 8 ? 2 : rows < 16 ? 4 : rows < 32 ? 8 : rows < 128 ? 16 : 64;
  }
  sizes.push_back(max_rows);
  return sizes;
}

}  // namespace

Batch device_batch(const BatchArrays& a, const DeviceSequences& device, std::span<const SequenceRows> sequences,
                   int64_t rows, std::span<const int32_t> logit_rows) {
  const auto n = static_cast<size_t>(rows);
  return {.tokens = {a.tokens, n},
          .positions = {a.positions, n},
          .sequences = sequences,
          .logit_rows = logit_rows,
          .device = &device};
}

DecodeGraphs::DecodeGraphs(const BatchArrays& arrays, const DeviceSequences& device, int32_t max_rows)
    : arrays_(arrays), device_(device), identity_(device_buffer(static_cast<size_t>(max_rows * arrays.places) * 4)) {
  std::vector<int32_t> numbers(static_cast<size_t>(max_rows * arrays.places));
  std::iota(numbers.begin(), numbers.end(), 0);
  device_copy(identity_.data(), numbers.data(), numbers.size() * 4);
  for (int32_t i = 0; i < max_rows; ++i)
    sequences_.push_back({.first_row = i * arrays.places, .num_tokens = arrays.places});
}

DecodeGraphs::~DecodeGraphs() {
  for (const Graphs& graphs : graphs_)
    for (cudaGraphExec_t exec : {graphs.forward, graphs.sample[0], graphs.sample[1], graphs.draft})
      if (exec != nullptr) cudaGraphExecDestroy(exec);
}

Status DecodeGraphs::capture(const Model& model, CudaOps& ops, const PagePool& pool, StepSampling& sampling,
                             DeviceDrafter* drafter) {
  arena_ = &ops.arena();
  num_growths_ = arena_->num_growths();
  for (const int32_t rows : bucket_sizes(static_cast<int32_t>(sequences_.size()))) {
    ASSIGN_OR_RETURN(const Graphs graphs, capture_bucket(rows, model, ops, pool, sampling, drafter));
    graphs_.push_back(graphs);
  }
  return {};
}

Result<DecodeGraphs::Graphs> DecodeGraphs::capture_bucket(int32_t rows, const Model& model, CudaOps& ops,
                                                          const PagePool& pool, StepSampling& sampling,
                                                          DeviceDrafter* drafter) {
  const int32_t tokens = rows * arrays_.places;
  const Batch batch = device_batch(arrays_, device_, std::span(sequences_).first(static_cast<size_t>(rows)), tokens,
                                   {reinterpret_cast<const int32_t*>(identity_.data()), static_cast<size_t>(tokens)});
  const auto draft = [&](const ModelOutput& output) {
    if (drafter != nullptr) drafter->draft({batch, output, pool, ops});
  };
  ops.begin_step();
  draft(model.forward(batch, ops, pool));
  RETURN_IF_ERROR(ops.status());
  ops.begin_step();
  ops.set_silent(false);
  Graphs graphs{.rows = rows};
  ModelOutput output;
  ASSIGN_OR_RETURN(graphs.forward, capture_graph(ops.stream(), [&] { output = model.forward(batch, ops, pool); }));
  for (const int32_t buffer : {0, 1}) {
    ASSIGN_OR_RETURN(graphs.sample[static_cast<size_t>(buffer)], capture_graph(ops.stream(), [&] {
                       sampling.deal(output.logits, {arrays_.sampled_by, static_cast<size_t>(tokens)});
                       sampling.sample(rows, output.logits, buffer);
                     }));
  }
  if (drafter != nullptr) {
    ASSIGN_OR_RETURN(graphs.draft, capture_graph(ops.stream(), [&] { draft(output); }));
  }
  ops.set_silent(true);
  return graphs;
}

int32_t DecodeGraphs::bucket(int32_t rows) const {
  for (const Graphs& graphs : graphs_)
    if (graphs.rows >= rows) return graphs.rows;
  return 0;
}

const DecodeGraphs::Graphs& DecodeGraphs::of(int32_t bucket) const {
  CHECK(arena_->num_growths() == num_growths_, "the arena has grown under the graphs");
  const auto found = std::find_if(graphs_.begin(), graphs_.end(), [&](const Graphs& g) { return g.rows == bucket; });
  CHECK(found != graphs_.end(), "no graphs of ", bucket, " rows");
  return *found;
}

void DecodeGraphs::forward(int32_t bucket, cudaStream_t stream) const {
  cuda_ok(cudaGraphLaunch(of(bucket).forward, stream), "launching a decode step");
}

void DecodeGraphs::sample(int32_t bucket, int32_t buffer, cudaStream_t stream) const {
  cuda_ok(cudaGraphLaunch(of(bucket).sample[static_cast<size_t>(buffer)], stream), "launching sampling");
}

void DecodeGraphs::draft(int32_t bucket, cudaStream_t stream) const {
  if (const cudaGraphExec_t graph = of(bucket).draft; graph != nullptr)
    cuda_ok(cudaGraphLaunch(graph, stream), "launching drafts");
}

}  // namespace perigee

#include "exec/cuda/decode_graphs.h"

#include <numeric>

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
    : arrays_(arrays), device_(device), identity_(device_buffer(static_cast<size_t>(max_rows) * 4)) {
  std::vector<int32_t> numbers(static_cast<size_t>(max_rows));
  std::iota(numbers.begin(), numbers.end(), 0);
  device_copy(identity_.data(), numbers.data(), numbers.size() * 4);
  for (int32_t i = 0; i < max_rows; ++i) sequences_.push_back({.first_row = i, .num_tokens = 1});
}

DecodeGraphs::~DecodeGraphs() {
  for (const Graph& graph : graphs_) cudaGraphExecDestroy(graph.exec);
}

Status DecodeGraphs::capture(const Model& model, CudaOps& ops, const PagePool& pool) {
  for (const int32_t rows : bucket_sizes(static_cast<int32_t>(sequences_.size())))
    RETURN_IF_ERROR(capture_one(rows, model, ops, pool));
  return {};
}

Status DecodeGraphs::capture_one(int32_t rows, const Model& model, CudaOps& ops, const PagePool& pool) {
  const Batch batch = device_batch(arrays_, device_, std::span(sequences_).first(static_cast<size_t>(rows)), rows,
                                   {reinterpret_cast<const int32_t*>(identity_.data()), static_cast<size_t>(rows)});
  ops.begin_step();
  model.forward(batch, ops, pool);
  RETURN_IF_ERROR(ops.status());
  ops.begin_step();
  Graph graph{.rows = rows};
  cudaGraph_t captured = nullptr;
  // Relaxed: other threads of this process may allocate meanwhile.
  cuda_ok(cudaStreamBeginCapture(ops.stream(), cudaStreamCaptureModeRelaxed), "starting a capture");
  graph.logits = model.forward(batch, ops, pool);
  cuda_ok(cudaStreamEndCapture(ops.stream(), &captured), "capturing a decode step");
  RETURN_IF_ERROR(ops.status());
  cuda_ok(cudaGraphInstantiate(&graph.exec, captured, 0), "making a graph");
  cudaGraphDestroy(captured);
  cuda_ok(cudaGraphUpload(graph.exec, ops.stream()), "loading a graph");
  RETURN_IF_ERROR(ops.status());
  graphs_.push_back(graph);
  return {};
}

int32_t DecodeGraphs::bucket(int32_t rows) const {
  for (const Graph& graph : graphs_)
    if (graph.rows >= rows) return graph.rows;
  return 0;
}

Tensor DecodeGraphs::launch(int32_t bucket, cudaStream_t stream) {
  for (const Graph& graph : graphs_) {
    if (graph.rows != bucket) continue;
    cuda_ok(cudaGraphLaunch(graph.exec, stream), "launching a decode step");
    return graph.logits;
  }
  return {};
}

}  // namespace perigee

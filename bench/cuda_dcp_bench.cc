// What it costs that GPUs share a cache: one layer of attention of a decode step, with the gather of queries, the
// exchange of results and their merge, beside the same work without them. Microseconds of a layer on rank 0, in a graph
// of kLayers; all GPUs of the machine are one dcp group, of as many tensor-parallel ranks.
//
//   cuda_dcp_bench [ranks]
//
// Local attention has the queries of all heads over a rank's own tokens, as in the whole, and this rank's products.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "bench/cuda_timing.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_comms.h"
#include "ops/cuda/backend.h"
#include "ops/cuda/mla/shared_exchange.h"
#include "ops/place_batch.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

using bench::must;

constexpr int kLayers = 30;
constexpr MlaShape kShape{.nope = 128, .rope = 64, .value = 128, .latent = 512, .softmax_scale = 0.1f};

struct Case {
  int32_t heads = 64, batch = 1, local_tokens = 4096;  // heads of all ranks
  LatentFormat format = LatentFormat::kBF16;
};

// `batch` sequences of one new token each, whose blocks are dealt in turn.
struct Sequences {
  Sequences(const Case& c, const Comm& dcp) {
    const int32_t blocks = c.local_tokens / kRowsOfBlock * dcp.size();
    for (int32_t b = 0; b < blocks; ++b) {
      owners.push_back(static_cast<uint8_t>(b % dcp.size()));
      if (b % dcp.size() == dcp.rank()) here.push_back(b);
    }
    pages.resize(here.size() * static_cast<size_t>(c.batch));
    std::iota(pages.begin(), pages.end(), 0);
    for (int32_t i = 0; i < c.batch; ++i) {
      positions.push_back(blocks * static_cast<int32_t>(kRowsOfBlock) - 1);
      rows.push_back({.first_row = i,
                      .num_tokens = 1,
                      .position = positions.back(),
                      .pages = pages.data() + static_cast<size_t>(i) * here.size(),
                      .shared = {.here = here, .owners = owners.data()}});
    }
    batch.positions = positions;
    batch.sequences = rows;
  }
  std::vector<uint8_t> owners;
  std::vector<int32_t> here, pages, positions;
  std::vector<SequenceRows> rows;
  Batch batch;
};

class Rank {
 public:
  Rank(int32_t rank, PeerComm& comm, std::barrier<>& meeting)
      : dcp_(comm), meeting_(meeting), ops_({.device = rank, .dcp = &dcp_}) {}

  void measure(const Case& c) {
    const Sequences host(c, dcp_);
    MlaShape shape = kShape, all = kShape;
    shape.heads = c.heads / dcp_.size();
    all.heads = c.heads;
    const int64_t row_bytes = latent_row_bytes(c.format, shape.latent, shape.rope);
    const int64_t page_bytes = kRowsOfBlock * row_bytes;
    pages_ = {};
    pages_ = device_buffer(host.pages.size() * static_cast<size_t>(page_bytes));
    cuda_ok(cudaMemsetAsync(pages_.data(), 0, pages_.size(), ops_.stream()), "clearing pages");
    const LatentLayer layer{
        .base = pages_.data(), .page_bytes = page_bytes, .row_bytes = row_bytes, .format = c.format};
    const std::vector<uint16_t> zeros(static_cast<size_t>(shape.heads * (shape.nope + shape.value) * shape.latent));
    const MlaUpWeight up = ops_.pack_mla_up({.format = WeightFormat::kBF16,
                                             .out = shape.heads * (shape.nope + shape.value),
                                             .in = shape.latent,
                                             .data = reinterpret_cast<const uint8_t*>(zeros.data())},
                                            shape);
    ops_.begin_step();
    const PlacedBatch placed(host.batch, ops_);
    const Batch& batch = placed.batch();
    const auto bf16 = [&](int64_t rows, int64_t cols) {
      const Tensor t = ops_.arena().tensor(DType::kBF16, rows, cols);
      cuda_ok(cudaMemsetAsync(t.data, 0, static_cast<size_t>(rows * cols) * 2, ops_.stream()), "clearing");
      return t;
    };
    const Tensor q = bf16(c.batch, shape.heads * shape.q_head());
    const Tensor queries = bf16(c.batch, c.heads * (shape.latent + shape.rope));
    const Tensor mine = bf16(c.batch, shape.heads * (shape.latent + shape.rope));
    const Tensor mixed = bf16(c.batch, shape.heads * shape.latent);
    const Tensor results = ops_.attend_latents(queries, all, batch, layer);
    Tensor by_head = mixed;
    by_head.rows = c.batch * shape.heads;
    by_head.cols = by_head.row_stride = shape.latent;

    const double whole_us = time([&] { ops_.mla_attend(q, up, shape, batch, layer); });
    const double local_us = time([&] {
      ops_.mla_absorb(q, up, shape, batch);
      ops_.attend_latents(queries, all, batch, layer);
      ops_.mla_project(mixed, up, shape, batch);
    });
    const double attention_us = time([&] { ops_.attend_latents(queries, all, batch, layer); });
    const double gather_us = time([&] { must(exchange_queries(dcp_.view(), mine, queries, ops_.stream())); });
    const double merge_us = time(
        [&] { must(exchange_results(dcp_.view(), results, static_cast<int>(shape.heads), by_head, ops_.stream())); });
    if (dcp_.rank() != 0) return;
    std::printf(
        "%-10s %3d heads, %3d sequences, %6d tokens here: %7.1f us, local attention and products %7.1f (attention "
        "alone %7.1f), exchange %6.1f (queries alone %5.1f, results alone %5.1f)\n",
        latent_format_name(c.format), c.heads, c.batch, c.local_tokens, whole_us, local_us, attention_us,
        whole_us - local_us, gather_us, merge_us);
    std::fflush(stdout);
  }

 private:
  // Microseconds of a call: the median of replays of a graph of kLayers.
  template <typename Call>
  double time(const Call& call) {
    const auto layers = [&] {
      for (int i = 0; i < kLayers; ++i) {
        const ArenaScope scratch(ops_.arena());
        call();
      }
    };
    dcp_.set_silent(true);
    layers();
    ops_.owned_stream().synchronize();
    meeting_.arrive_and_wait();
    dcp_.set_silent(false);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin)), must(cudaEventCreate(&end));
    must(cudaStreamBeginCapture(ops_.stream(), cudaStreamCaptureModeRelaxed));
    layers();
    must(cudaStreamEndCapture(ops_.stream(), &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    must(cudaGraphUpload(exec, ops_.stream()));
    ops_.owned_stream().synchronize();
    std::vector<float> times;
    for (int i = 0; i < bench::kReplays + 5; ++i) {
      meeting_.arrive_and_wait();
      must(cudaEventRecord(begin, ops_.stream())), must(cudaGraphLaunch(exec, ops_.stream()));
      must(cudaEventRecord(end, ops_.stream()));
      must(cudaEventSynchronize(end));
      float ms = 0;
      must(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 5) times.push_back(ms);
    }
    meeting_.arrive_and_wait();
    must(cudaGraphExecDestroy(exec)), must(cudaGraphDestroy(graph));
    must(cudaEventDestroy(begin)), must(cudaEventDestroy(end));
    if (!ops_.status().ok()) std::fprintf(stderr, "%s\n", ops_.status().error().message.c_str()), std::exit(1);
    std::nth_element(times.begin(), times.begin() + bench::kReplays / 2, times.end());
    return times[bench::kReplays / 2] * 1e3 / kLayers;
  }

  PeerComm& dcp_;
  std::barrier<>& meeting_;
  CudaOps ops_;
  Buffer pages_;
};

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  using namespace perigee;
  const auto gpus = static_cast<int32_t>(list_gpus().size());
  const int32_t ranks = argc > 1 ? std::atoi(argv[1]) : gpus;
  if (ranks < 2 || ranks > gpus) return std::fprintf(stderr, "%d ranks on %d GPUs\n", ranks, gpus), 1;
  PeerComms comms(ranks, ranks);
  std::barrier<> meeting(ranks);
  std::vector<std::jthread> threads;
  for (int32_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      if (!select_device(r).ok()) std::exit(1);
      auto pair = comms.connect(r);
      if (!pair.ok()) std::fprintf(stderr, "%s\n", pair.error().message.c_str()), std::exit(1);
      Rank rank(r, dynamic_cast<PeerComm&>(*pair->dcp), meeting);
      for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF8E4M3, LatentFormat::kF8Tiles})
        for (const int32_t heads : {64, 128})
          for (const int32_t batch : {1, 8, 32, 64}) rank.measure({.heads = heads, .batch = batch, .format = format});
      meeting.arrive_and_wait();
    });
  threads.clear();
  return 0;
}

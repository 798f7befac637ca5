#include "comm/cuda/peer_links.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <thread>

#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_comms.h"
#include "tensor/cuda/check.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr int64_t kSmall = 2304, kLarge = 16 << 20;  // numbers
constexpr int kSmallCalls = 100, kLargeCalls = 4, kTurns = 5;

// One of the two ranks that measure a link.
class LinkEnd {
 public:
  explicit LinkEnd(PeerComm& comm) : comm_(comm), memory_(device_buffer(kLarge * 4)) {
    comm_.set_stream(stream_.get());
    cuda_ok(cudaMemsetAsync(memory_.data(), 0, memory_.size(), stream_.get()), "clearing memory");
    stream_.synchronize();
  }

  // Milliseconds of so many sums of that many numbers, launched together: the best of a few turns.
  float best_ms(int64_t numbers, int calls) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cuda_ok(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "capturing sums");
    for (int i = 0; i < calls; ++i)
      comm_.all_reduce({.data = memory_.data(), .rows = 1, .cols = numbers, .row_stride = numbers});
    cuda_ok(cudaStreamEndCapture(stream_.get(), &graph), "capturing sums");
    if (!cuda_ok(cudaGraphInstantiate(&exec, graph, 0), "making a graph of sums")) return 0;
    float best = 1e9f;
    for (int turn = 0; turn < kTurns; ++turn) best = std::min(best, replay_ms(exec));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return best;
  }

 private:
  float replay_ms(cudaGraphExec_t exec) {
    Event begin(true), end(true);
    begin.record(stream_);
    cuda_ok(cudaGraphLaunch(exec, stream_.get()), "launching sums");
    end.record(stream_);
    end.wait();
    float ms = 0;
    cuda_ok(cudaEventElapsedTime(&ms, begin.get(), end.get()), "timing sums");
    return ms;
  }

  PeerComm& comm_;
  Stream stream_;
  Buffer memory_;
};

// Why there are none; empty: `rates` has them.
std::string measure_sums(int32_t first, int32_t second, Carrier carrier, SumRates& rates) {
  PeerComms comms(2, 1, {.carrier = carrier, .one_shot_bytes = {}});
  std::array<std::string, 2> why;
  std::array<double, 2> small_ms{}, large_ms{};
  const auto run = [&](size_t rank) {
    const Status selected = select_device(rank == 0 ? first : second);
    if (!selected.ok()) {
      why[rank] = selected.error().message;
      return comms.abort();
    }
    const auto pair = comms.connect(static_cast<int32_t>(rank));
    if (!pair.ok()) {
      why[rank] = pair.error().message;
      return;
    }
    LinkEnd end(*static_cast<PeerComm*>(pair->all));
    small_ms[rank] = end.best_ms(kSmall, kSmallCalls);
    large_ms[rank] = end.best_ms(kLarge, kLargeCalls);
    if (const Status status = device_status(); !status.ok()) {
      why[rank] = status.error().message;
      comms.abort();
    }
  };
  {
    const std::jthread other(run, 1);
    run(0);
  }
  std::string why_none = why[0].empty() ? why[1] : why[0];
  if (!why_none.empty()) return why_none;
  rates.us = *std::min_element(small_ms.begin(), small_ms.end()) * 1e3 / kSmallCalls;
  rates.gbs = 4.0 * kLarge * kLargeCalls / *std::max_element(large_ms.begin(), large_ms.end()) * 1e-6;
  return why_none;
}

PeerLink measure(int32_t first, int32_t second) {
  PeerLink link{.first = first, .second = second};
  link.why_none = measure_sums(first, second, Carrier::kPeer, link.peer);
  measure_sums(first, second, Carrier::kHost, link.host);
  return link;
}

}  // namespace

std::vector<PeerLink> measure_peer_links(int32_t num_gpus) {
  std::vector<PeerLink> links;
  for (int32_t second = 1; second < num_gpus; ++second)
    for (int32_t first = 0; first < second; ++first) {
      // On a thread of its own: the caller's GPU stays selected.
      std::jthread([&] { links.push_back(measure(first, second)); }).join();
    }
  return links;
}

}  // namespace perigee

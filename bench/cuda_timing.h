// Timing of CUDA work for the benchmarks here: a captured graph of calls, replayed.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace perigee::bench {

inline constexpr double kReadRate = 4.54e12, kMatrixRate = 790e12;  // bytes/s and flop/s an H200 was seen to reach
inline constexpr int kReplays = 11;
inline constexpr std::chrono::milliseconds kWakeTime{300};  // an idle GPU takes so long to reach its clock

inline void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Device memory of the caller's.
template <typename T>
T* upload(const std::vector<T>& host) {
  T* data = nullptr;
  must(cudaMalloc(&data, host.size() * sizeof(T)));
  must(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// Microseconds of one of `calls` calls: the median of kReplays replays of a graph of all, on a GPU that is awake. Cold
// memory is the caller's: each call works on other data, together several times the L2.
inline double time_calls(cudaStream_t stream, int calls, const std::function<void(int)>& call) {
  const auto all = [&] {
    for (int i = 0; i < calls; ++i) call(i);
  };
  all();
  must(cudaStreamSynchronize(stream));
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  all();
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  must(cudaStreamEndCapture(stream, &graph));
  must(cudaGraphInstantiate(&exec, graph, 0));
  for (static const auto start = std::chrono::steady_clock::now();
       std::chrono::steady_clock::now() - start < kWakeTime;)
    must(cudaGraphLaunch(exec, stream)), must(cudaStreamSynchronize(stream));
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin)), must(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays + 2; ++i) {
    must(cudaEventRecord(begin, stream)), must(cudaGraphLaunch(exec, stream)), must(cudaEventRecord(end, stream));
    must(cudaEventSynchronize(end));
    float ms = 0;
    must(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  must(cudaGraphExecDestroy(exec)), must(cudaGraphDestroy(graph));
  must(cudaEventDestroy(begin)), must(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2] * 1e3 / calls;
}

// A row of a table: time, rates, and the share of the limit, the larger of bytes / kReadRate and flop / kMatrixRate.
inline void print_row(const std::string& name, double us, double bytes, double flop = 0, const std::string& note = {}) {
  const double limit = std::max(bytes / kReadRate, flop / kMatrixRate) * 1e6;
  std::printf("%-34s %9.1f us %7.0f GB/s %6.1f TFLOP/s %5.0f %% of %7.1f us%s%s\n", name.c_str(), us, bytes / us / 1e3,
              flop / us / 1e6, 100 * limit / us, limit, note.empty() ? "" : "   ", note.c_str());
  std::fflush(stdout);
}

// Rows are chosen by the program's arguments: those whose name holds one of them, or all.
inline std::vector<std::string> filters;

inline bool wanted(const std::string& name) {
  return filters.empty() || std::any_of(filters.begin(), filters.end(),
                                        [&](const std::string& f) { return name.find(f) != std::string::npos; });
}

}  // namespace perigee::bench

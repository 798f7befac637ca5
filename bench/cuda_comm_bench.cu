// Collectives of GPUs that reach each other's memory, each form forced and as it is chosen, and NCCL's sum beside them
// where libnccl.so.2 can be loaded. Microseconds of a call in a graph (median of replays, the slowest rank's), and GB/s
// of the bytes that a ring would move a direction: 2 (p - 1) / p of the operand for sums, what arrives for the others.
// Sums are of bf16, those with norms of terms (comm/cuda/term.h) into an f32 residual.
//
//   cuda_comm_bench [number of GPUs, default all] [substring of rows' names ...]
#include <dlfcn.h>

#include <barrier>
#include <limits>
#include <thread>

#include "bench/cuda_timing.h"
#include "comm/cuda/peer_comm.h"
#include "comm/cuda/peer_comms.h"
#include "ops/cuda/elementwise.h"
#include "ops/cuda/reduce_norm.h"
#include "ops/cuda/scatter_norm.h"
#include "tensor/cuda/gpus.h"

namespace perigee {
namespace {

using bench::must;

constexpr size_t kOneShot = std::numeric_limits<size_t>::max(), kTwoShot = 0;
constexpr int64_t kMostRows = 8192, kMostCols = 7168;
constexpr int kWarm = 3, kReplays = 15;

// The few functions of NCCL's that are called, as its ABI has them.
struct Nccl {
  using Comm = void*;
  int (*init_all)(Comm* comms, int count, const int* devices) = nullptr;
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, Comm comm, cudaStream_t) = nullptr;
  std::vector<Comm> comms;
  static constexpr int kBfloat16 = 9, kSum = 0;

  bool load(int ranks) {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    init_all = reinterpret_cast<decltype(init_all)>(dlsym(library, "ncclCommInitAll"));
    all_reduce = reinterpret_cast<decltype(all_reduce)>(dlsym(library, "ncclAllReduce"));
    comms.resize(static_cast<size_t>(ranks));
    return init_all != nullptr && all_reduce != nullptr && init_all(comms.data(), ranks, nullptr) == 0;
  }
};

struct Bench {
  explicit Bench(int the_size)
      : size(the_size), comms(the_size, 1), meeting(the_size), times(static_cast<size_t>(the_size)) {}
  const int size;
  PeerComms comms;
  std::barrier<> meeting;
  std::vector<std::vector<float>> times;  // of each rank
  Nccl nccl;
  bool has_nccl = false;
  std::vector<std::string> filters;

  bool wants(const std::string& name) const {
    if (filters.empty()) return true;
    for (const std::string& filter : filters)
      if (name.find(filter) != std::string::npos) return true;
    return false;
  }
};

// Keeps the GPU busy with nothing for so long.
__global__ void idle_kernel(uint64_t ns) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < ns);
}

// The same, while a word is written to every other GPU each 2 us.
__global__ void awake_kernel(uint64_t ns, const __grid_constant__ PeerView view) {
  uint64_t begin, now, next = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begin < next) continue;
    next += 2000;
    for (int r = 0; r < view.size; ++r)
      if (r != view.rank)
        asm volatile(
            "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(&view.memory[r]->messages[0][kMostPeerBlocks - 1][view.rank]),
            "l"(now)
            : "memory");
  } while (now - begin < ns);
}

// Reads and writes memory, so that nothing else is left in caches.
__global__ void touch_kernel(float4* data, int64_t count) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
    float4 x = data[i];
    x.x += 1;
    data[i] = x;
  }
}

class RankBench {
 public:
  RankBench(Bench& all, int rank, PeerComm& comm) : all_(all), rank_(rank), comm_(comm) {
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const size_t bytes = kMostRows * kMostCols * 4;
    for (void** memory : {&x_, &residual_, &out_}) {
      must(cudaMalloc(memory, bytes));
      must(cudaMemset(*memory, 0, bytes));
    }
    must(cudaMalloc(reinterpret_cast<void**>(&to_), 65536 * 4));
    std::vector<int32_t> to(65536);
    for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<int32_t>(i / 8) % all.size;
    must(cudaMemcpy(to_, to.data(), to.size() * 4, cudaMemcpyHostToDevice));
    must(cudaDeviceSynchronize());
    comm_.set_stream(stream_);
  }

  void run() {
    for (const int64_t cols : {2304, 7168})
      for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64, 128, 512, 8192}) sums(rows, cols);
    for (const int64_t tokens : {1, 8, 64, 512}) dcp(tokens);
    after_other_work();
    comm_.set_one_shot_bytes(kOneShot);
    time("barrier", 50, 0, [&] { comm_.barrier(); });
  }

 private:
  Tensor f32(void* data, int64_t rows, int64_t cols) const {
    return {.data = data, .rows = rows, .cols = cols, .row_stride = cols};
  }
  Tensor bf16(void* data, int64_t rows, int64_t cols) const {
    return {.data = data, .dtype = DType::kBF16, .rows = rows, .cols = cols, .row_stride = cols};
  }

  static Tensor as_terms(Tensor x) {
    x.dtype = DType::kF16;
    return x;
  }

  void sums(int64_t rows, int64_t cols) {
    const Tensor x = bf16(x_, rows, cols), terms = as_terms(x), residual = f32(residual_, rows, cols),
                 out = bf16(out_, rows, cols);
    const auto* weight = reinterpret_cast<const float*>(to_);
    const int calls = rows >= 8192 ? 8 : 48;
    const double bytes = static_cast<double>(rows * cols * 2) * 2 * (all_.size - 1) / all_.size;
    const std::string shape = " [" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
    const auto norm = [&] { must(rms_norm_rows(residual, nullptr, weight, 1e-5f, out, stream_)); };
    const auto sum_norm = [&] { must(reduce_norm_rows(comm_.view(), residual, terms, weight, 1e-5f, out, stream_)); };
    struct Form {
      const char* name;
      size_t one_shot, flagged, box;  // bytes
    };
    for (const auto& [name, one_shot, flagged, box] :
         {Form{"by flags", kOneShot, kOneShot, mailbox_bytes(all_.size) / 2},
          Form{"by numbers", kOneShot, 0, number_box_bytes(all_.size)}, Form{"two-shot", kTwoShot, 0, kOneShot},
          Form{"chosen", one_shot_bytes(all_.size), kFlaggedBytes, kOneShot}}) {
      if (static_cast<size_t>(rows * cols * 2) > box) continue;
      comm_.set_one_shot_bytes(one_shot);
      comm_.set_flagged_bytes(flagged);
      time(std::string("sum ") + name + shape, calls, bytes, [&] { comm_.all_reduce(x); });
      if (reduce_norm_pays(comm_.view(), residual, terms, out))
        time(std::string("sum+norm ") + name + shape, calls, bytes, sum_norm);
    }
    time("sum, then norm, chosen" + shape, calls, bytes, [&] {
      comm_.add_up(terms, residual);
      norm();
    });
    if (scatter_norm_pushes(comm_.view(), residual))
      time("scatter+norm+gather, pushed" + shape, calls, bytes, [&] {
        must(scatter_norm_rows(comm_.view(), residual, terms, weight, 1e-5f, out, stream_, ScatterForm::kPush));
      });
    for (const int blocks : {64, 128, 256, 512})
      time("scatter+norm+gather, " + std::to_string(blocks) + " blocks" + shape, calls, bytes, [&] {
        must(scatter_norm_rows(comm_.view(), residual, terms, weight, 1e-5f, out, stream_, ScatterForm::kPull, blocks));
      });
    time("norm alone" + shape, calls, 0, norm);
    if (!all_.has_nccl) return;
    const auto nccl_sum = [&] {
      if (all_.nccl.all_reduce(x.data, x.data, static_cast<size_t>(rows * cols), Nccl::kBfloat16, Nccl::kSum,
                               all_.nccl.comms[static_cast<size_t>(rank_)], stream_) != 0)
        must(cudaErrorUnknown);
    };
    time("NCCL sum" + shape, calls, bytes, nccl_sum);
    time("NCCL sum, then norm, not added to a residual" + shape, calls, bytes, [&] {
      nccl_sum();
      norm();
    });
  }

  // What an exchange takes between other work, which takes so long by itself.
  void after_other_work() {
    comm_.set_one_shot_bytes(one_shot_bytes(all_.size));
    const auto both = [&](const std::string& what, const std::function<void()>& work) {
      time(what + " alone", 20, 0, work);
      time("scatter+norm+gather [8192, 2304] and " + what, 20, 0, [&] {
        work();
        must(scatter_norm_rows(comm_.view(), f32(residual_, 8192, 2304), as_terms(bf16(x_, 8192, 2304)),
                               reinterpret_cast<const float*>(to_), 1e-5f, bf16(out_, 8192, 2304), stream_));
      });
      for (const size_t bytes : {size_t{128} << 10, size_t{16} << 20})
        time("gather of " + std::to_string(bytes >> 10) + " KiB and " + what, 20, 0, [&] {
          work();
          comm_.all_gather(x_, bytes, out_);
        });
    };
    for (const uint64_t us : {10, 30, 100, 300, 1000})
      both(std::to_string(us) + " us idle", [&, us] { idle_kernel<<<1, 1, 0, stream_>>>(us * 1000); });
    for (const uint64_t us : {300, 1000})
      both(std::to_string(us) + " us with the links awake",
           [&, us] { awake_kernel<<<1, 1, 0, stream_>>>(us * 1000, comm_.view()); });
    for (const int64_t mb : {20, 100, 400})
      both(std::to_string(mb) + " MB touched",
           [&, mb] { touch_kernel<<<1056, 256, 0, stream_>>>(static_cast<float4*>(residual_), mb * 62500 / 2); });
  }

  // What attention over a shared cache exchanges: queries of 64 heads, then their results.
  void dcp(int64_t tokens) {
    constexpr int64_t kHeads = 64, kQuery = 576 * 2, kResult = 513;
    const std::string shape = " [" + std::to_string(tokens) + " tokens]";
    const auto mine = static_cast<size_t>(tokens * kHeads / all_.size * kQuery);
    const int64_t rows = tokens * kHeads;
    const double others = all_.size - 1;
    for (const auto& [name, form] : {std::pair("one-shot", kOneShot), std::pair("two-shot", kTwoShot),
                                     std::pair("chosen", one_shot_bytes(all_.size))}) {
      comm_.set_one_shot_bytes(form);
      // What projections into latent space would exchange if ranks divided them: 2,112 columns, Kimi-K2's.
      const auto latents = static_cast<size_t>(tokens * 2112 / all_.size * 4);
      time(std::string("gather latents ") + name + shape, 48, others * static_cast<double>(latents),
           [&] { comm_.all_gather(x_, latents, out_); });
      time(std::string("gather queries ") + name + shape, 48, others * static_cast<double>(mine),
           [&] { comm_.all_gather(x_, mine, out_); });
      time(std::string("deal results ") + name + shape, 48,
           others / all_.size * static_cast<double>(rows * kResult * 4), [&] {
             comm_.all_to_all(f32(x_, rows, kResult), {to_, static_cast<size_t>(rows)},
                              f32(out_, rows / all_.size, kResult * all_.size));
           });
    }
  }

  void time(const std::string& name, int calls, double bytes, const std::function<void()>& call) {
    if (!all_.wants(name)) return;
    all_.meeting.arrive_and_wait();
    call();
    must(cudaStreamSynchronize(stream_));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call();
    must(cudaStreamEndCapture(stream_, &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    must(cudaGraphUpload(exec, stream_));
    must(cudaStreamSynchronize(stream_));
    all_.meeting.arrive_and_wait();
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin)), must(cudaEventCreate(&end));
    std::vector<float>& times = all_.times[static_cast<size_t>(rank_)];
    times.clear();
    for (int i = 0; i < kWarm + kReplays; ++i) {
      all_.meeting.arrive_and_wait();
      must(cudaEventRecord(begin, stream_)), must(cudaGraphLaunch(exec, stream_)), must(cudaEventRecord(end, stream_));
      must(cudaEventSynchronize(end));
      float ms = 0;
      must(cudaEventElapsedTime(&ms, begin, end));
      if (i >= kWarm) times.push_back(ms * 1e3f / static_cast<float>(calls));
    }
    must(cudaEventDestroy(begin)), must(cudaEventDestroy(end));
    must(cudaGraphExecDestroy(exec)), must(cudaGraphDestroy(graph));
    all_.meeting.arrive_and_wait();
    if (rank_ == 0) print(name, bytes);
    all_.meeting.arrive_and_wait();
  }

  // Of each replay the rank that waited least for another one to begin.
  void print(const std::string& name, double bytes) const {
    std::vector<float> least = all_.times[0];
    for (const std::vector<float>& times : all_.times)
      for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], times[i]);
    std::sort(least.begin(), least.end());
    const double us = least[least.size() / 2];
    std::printf("%-44s %9.2f us", name.c_str(), us);
    if (bytes > 0) std::printf(" %8.1f GB/s", bytes / us * 1e-3);
    std::printf("\n");
    std::fflush(stdout);
  }

  Bench& all_;
  const int rank_;
  PeerComm& comm_;
  cudaStream_t stream_ = nullptr;
  void *x_ = nullptr, *residual_ = nullptr, *out_ = nullptr;
  int32_t* to_ = nullptr;
};

void run_rank(Bench& bench, int rank) {
  must(cudaSetDevice(rank));
  auto pair = bench.comms.connect(rank);
  if (!pair.ok()) {
    std::fprintf(stderr, "%s\n", pair.error().message.c_str());
    std::exit(1);
  }
  must(load_reduce_norm());
  must(load_scatter_norm());
  RankBench(bench, rank, *static_cast<PeerComm*>(pair->all)).run();
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  using namespace perigee;
  int size = static_cast<int>(list_gpus().size());
  if (argc > 1) size = std::min(size, std::atoi(argv[1]));
  if (size < 2) {
    std::fprintf(stderr, "a collective needs two GPUs\n");
    return 1;
  }
  Bench bench(size);
  for (int i = 2; i < argc; ++i) bench.filters.emplace_back(argv[i]);
  bench.has_nccl = bench.nccl.load(size);
  std::printf("%s; NCCL %s\n", peer_choices_text(size, true).c_str(),
              bench.has_nccl ? "beside them" : "cannot be loaded");
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&bench, rank] { run_rank(bench, rank); });
  return 0;
}

// cuda_transfer_bench [--gpus 1|2] [--carrier cuda_ipc|tcp] [--turns N] [--blocks N] [--block-bytes B]
//                     [--state-units N]
//
// What a cache transfer between two processes of this machine moves a second: this process takes, a child that it
// starts gives. With --gpus 2 the child is on GPU 1. Then a plain copy within the GPU, or between the two. All in GB/s
// (10^9), each turn and the median.
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "kv/cuda/gpu_pages.h"
#include "kv/lease_table.h"
#include "kv/tcp_peer.h"
#include "kv/transfer.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

using Flags = std::map<std::string, std::string>;  // each of kFlags, with a value; --role is the child's
constexpr const char* kFlags[] = {"--gpus",        "--carrier", "--blocks", "--block-bytes",
                                  "--state-units", "--turns",   "--role"};

int64_t number(const Flags& flags, const char* name, int64_t otherwise) {
  const auto found = flags.find(name);
  return found == flags.end() ? otherwise : std::stoll(found->second);
}

// Blocks of latents and a state, whose pages lie back to front.
struct Node {
  Node(const Flags& flags, bool gives) {
    const int64_t row_bytes = 1152,
                  layers = std::max<int64_t>(1, number(flags, "block-bytes", 516096) / (64 * row_bytes));
    const int64_t units = number(flags, "state-units", 640), unit_bytes = 128 * 128 * 4 + 3 * 3 * 128 * 4;
    layout = {CacheGroup::latent(layers, 512, 64, LatentFormat::kBF16), CacheGroup::state(units, 1, unit_bytes, 128)};
    const auto num_blocks = static_cast<int32_t>(number(flags, "blocks", 3072));
    const auto num_pages = static_cast<int32_t>(num_blocks + layout.state_pages());
    const auto bytes = static_cast<size_t>(num_pages * layout.page_bytes());
    RankPages rank{.layout = layout};
    const int gpu = gives && number(flags, "gpus", 1) > 1 ? 1 : 0;
    CHECK(select_device(gpu).ok(), "no GPU ", gpu);
    memory = device_buffer(bytes);
    auto pages = make_gpu_pages({.gpu = gpu,
                                 .most_unit_bytes = std::max(layout.latent().least_page_bytes(), unit_bytes),
                                 .areas = {.given = gives ? 4 : 0, .reads = !gives}});
    CHECK(pages.ok(), pages.error().message);
    rank.memory = *pages;
    rank.base = memory.data();
    store = PageStore({rank});
    store.describe(shape);
    for (int32_t i = num_blocks; i-- > 0;) blocks.push_back({PageId(i), 0});
    for (int32_t i = num_blocks; i < num_pages; ++i) checkpoint.push_back({PageId(i), 0});
  }
  int64_t bytes() const {
    return std::ssize(blocks) * shape.block_bytes + shape.state_units() * shape.state_unit_bytes;
  }
  UnitPages pages() const { return {.blocks = blocks, .checkpoint = checkpoint}; }
  std::vector<UnitRange> units() const {
    return {{UnitGroup::kBlocks, 0, static_cast<int32_t>(blocks.size())}, {UnitGroup::kState, 0, shape.state_units()}};
  }

  CacheLayout layout;
  Buffer memory;
  PageStore store;
  CacheShape shape;
  std::vector<Placement> blocks, checkpoint;
};

TcpOptions options_of(const Flags& flags) {
  TcpOptions options{.secret = "secret"};
  options.areas = !flags.contains("carrier") || flags.at("carrier") != "tcp";
  return options;
}

std::shared_ptr<const std::vector<int32_t>> tokens_of(const Node& node) {
  return std::make_shared<const std::vector<int32_t>>(node.blocks.size() * kBlockTokens, 5);
}

// The child: prints its port, gives a lease for each line it reads, and ends with its input.
int give(const Flags& flags) {
  const Node node(flags, true);
  LeaseTable table(node.store, node.shape, 1, 60, system_clock(), [](SequenceId) {});
  auto server = LeaseServer::start(table, "127.0.0.1", 0, options_of(flags));
  CHECK(server.ok(), server.error().message);
  for (int64_t turn = 1; turn <= number(flags, "turns", 5); ++turn)
    table.grant(std::make_shared<Lease>(Lease{SequenceId(turn), node.blocks, node.checkpoint}), tokens_of(node));
  std::printf("%d\n", (*server)->port());
  std::fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  return 0;
}

struct Child {
  pid_t pid = 0;
  int port = 0, to = -1;
};
Child start(const char* program, std::vector<std::string> arguments) {
  int in[2], out[2];
  CHECK(pipe(in) == 0 && pipe(out) == 0);
  Child child;
  child.pid = fork();
  if (child.pid == 0) {
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    for (const int fd : {in[0], in[1], out[0], out[1]}) close(fd);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(program, argv.data());
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  child.to = in[1];
  FILE* from = fdopen(out[0], "r");
  CHECK(std::fscanf(from, "%d", &child.port) == 1, "the giving process has not started");
  return child;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Of bytes and seconds.
void print_rates(const char* what, int64_t bytes, const std::vector<double>& seconds) {
  std::printf("%s: %.3f GB, GB/s:", what, static_cast<double>(bytes) * 1e-9);
  for (const double s : seconds) std::printf(" %.1f", static_cast<double>(bytes) * 1e-9 / s);
  std::printf("; median %.1f\n", static_cast<double>(bytes) * 1e-9 / median(seconds));
  std::fflush(stdout);
}

// On one GPU within it, else from GPU 1 to GPU 0.
std::vector<double> plain_copy(size_t bytes, bool two, int64_t turns) {
  CHECK(select_device(two ? 1 : 0).ok());
  const Buffer from = device_buffer(bytes);
  CHECK(select_device(0).ok());
  const Buffer to = device_buffer(bytes);
  if (two) CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaSuccess, "no peer access between the GPUs");
  std::vector<double> seconds;
  device_copy(to.data(), from.data(), bytes);
  for (int64_t turn = 0; turn < turns; ++turn) {
    const double begin_s = system_clock().now_s();
    device_copy(to.data(), from.data(), bytes);
    seconds.push_back(system_clock().now_s() - begin_s);
  }
  CHECK(device_status().ok(), device_status().error().message);
  return seconds;
}

int take(const char* program, const std::vector<std::string>& arguments, const Flags& flags) {
  std::vector<std::string> of_child = arguments;
  of_child.insert(of_child.end(), {"--role", "give"});
  const Child child = start(program, of_child);
  int64_t bytes = 0;
  {
    const Node node(flags, false);
    const Connect connect = connect_by_tcp(options_of(flags));
    auto peer = connect(str_cat("127.0.0.1:", child.port), node.shape, {});
    CHECK(peer.ok(), peer.error().message);
    const auto tokens = tokens_of(node);
    std::vector<double> seconds;
    double opened_s = 0, pulled_s = 0;  // of the last turn
    for (int64_t turn = 1; turn <= number(flags, "turns", 5); ++turn) {
      const LeaseName lease{1, turn};
      const double begin_s = system_clock().now_s();
      CHECK((*peer)->open(lease, *tokens, static_cast<int32_t>(node.blocks.size())).ok());
      opened_s = system_clock().now_s() - begin_s;
      for (const UnitRange units : node.units()) {
        const Status pulled = (*peer)->pull(lease, units, node.store, node.pages(), {});
        CHECK(pulled.ok(), pulled.error().message);
      }
      pulled_s = system_clock().now_s() - begin_s - opened_s;
      CHECK((*peer)->extend(lease).ok());
      seconds.push_back(system_clock().now_s() - begin_s);
    }
    bytes = node.bytes();
    print_rates("transfer", bytes, seconds);
    std::printf("the last: opened after %.2f ms, pulled in %.2f ms\n", 1e3 * opened_s, 1e3 * pulled_s);
  }
  close(child.to);
  waitpid(child.pid, nullptr, 0);
  print_rates("plain copy", bytes, plain_copy(static_cast<size_t>(bytes), number(flags, "gpus", 1) > 1, 5));
  return 0;
}

int run(int argc, char** argv) {
  const std::vector<std::string> arguments(argv, argv + argc);
  Flags flags;
  for (size_t i = 1; i < arguments.size(); i += 2) {
    const bool known = std::find(std::begin(kFlags), std::end(kFlags), arguments[i]) != std::end(kFlags);
    if (!known || i + 1 == arguments.size())
      return std::fprintf(stderr, "not a flag with a value: %s\n", arguments[i].c_str()), 2;
    flags[arguments[i].substr(2)] = arguments[i + 1];
  }
  return flags.contains("role") ? give(flags) : take("/proc/self/exe", arguments, flags);
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  return perigee::run(argc, argv);
}

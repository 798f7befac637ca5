// transfer_bench: one prompt's cache from one process to another, against a plain copy of as many bytes over a socket.
//
//   transfer_bench [GIB] [RUNS] [STREAMS] [PIECE_KIB]
//
// Both processes are this program. Blocks are Kimi-Linear-48B's: 7 latent layers in bf16, 504 KiB a block. Each run
// prints GB/s (10^9 bytes a second) of the plain copy and of the transfer, in turn, and the medians follow. A transfer
// is all of it: gather, digest, frames, digest, scatter, and the last question whether the lease stands.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "kv/tcp_peer.h"
#include "kv/transfer.h"

namespace perigee {
namespace {

struct Node {
  explicit Node(int32_t num_blocks) : memory(static_cast<size_t>(num_blocks * layout.page_bytes()), 1) {
    store.describe(shape);
    for (int32_t i = 0; i < num_blocks; ++i) blocks.push_back({PageId(i), 0});
  }
  CacheLayout layout = {CacheGroup::latent(7, 512, 64, LatentFormat::kBF16)};
  std::vector<uint8_t> memory;
  PageStore store{{RankPages{.base = memory.data(), .layout = layout}}};
  CacheShape shape;
  std::vector<Placement> blocks;
};

template <typename T>
T must(Result<T> result) {
  CHECK(result.ok(), result.error().message);
  return std::move(*result);
}
void must(const Status& status) {
  CHECK(status.ok(), status.error().message);
}

constexpr size_t kPlainPiece = size_t{1} << 20;

// The process that gives: a lease server on one port, plain bytes on another.
[[noreturn]] void give(int32_t num_blocks, int runs, int ports) {
  Node node(num_blocks);
  for (size_t i = 0; i < node.memory.size(); ++i) node.memory[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  const auto tokens = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(num_blocks) * kBlockTokens, 5);
  LeaseTable table(node.store, node.shape, 7, 3600, system_clock(), [](SequenceId) {});
  for (int i = 1; i <= runs; ++i)
    (void)table.grant(std::make_shared<Lease>(Lease{.sequence = SequenceId(i), .blocks = node.blocks}), tokens);
  const auto server = must(LeaseServer::start(table, "127.0.0.1", 0, {.secret = "secret"}));
  const Socket listener = must(Socket::listen("127.0.0.1", 0));
  const int both[] = {server->port(), listener.port()};
  CHECK(write(ports, both, sizeof(both)) == sizeof(both));
  const Socket plain = must(listener.accept());
  for (uint8_t go = 0; plain.receive({&go, 1}, 3600).ok();)
    for (size_t at = 0; at < node.memory.size(); at += kPlainPiece)
      must(plain.send(std::span(node.memory).subspan(at, std::min(kPlainPiece, node.memory.size() - at)), 60));
  std::_Exit(0);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run(double gib, int runs, const TcpOptions& options) {
  set_log_level(LogLevel::kWarning);
  const Node sizes(1);
  const auto num_blocks = static_cast<int32_t>(gib * (1 << 30) / static_cast<double>(sizes.layout.page_bytes()));
  int out[2], ports[2];
  CHECK(pipe(out) == 0);
  if (fork() == 0) give(num_blocks, runs, out[1]);
  CHECK(read(out[0], ports, sizeof(ports)) == sizeof(ports));
  const std::string peer = "127.0.0.1:" + std::to_string(ports[0]);
  const Socket plain = must(Socket::connect("127.0.0.1:" + std::to_string(ports[1]), 5));

  Node node(num_blocks);
  const auto tokens = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(num_blocks) * kBlockTokens, 5);
  std::atomic<int> num_ended{0};
  Transfer transfer(node.store, node.shape, connect_by_tcp(options), {}, [&](SequenceId, const TransferEnd& end) {
    CHECK(end.how == TransferEnd::How::kArrived, end.why ? end.why->message : "nothing was said");
    ++num_ended;
  });
  const double bytes = static_cast<double>(node.memory.size());
  std::vector<double> plain_rates, rates;
  for (int i = 1; i <= runs; ++i) {
    double begin_s = system_clock().now_s();
    const uint8_t go = 1;
    must(plain.send({&go, 1}, 60));
    for (size_t at = 0; at < node.memory.size(); at += kPlainPiece)
      must(plain.receive(std::span(node.memory).subspan(at, std::min(kPlainPiece, node.memory.size() - at)), 60));
    plain_rates.push_back(bytes / (system_clock().now_s() - begin_s) / 1e9);
    transfer.prepare(SequenceId(i), {.peer = peer, .lease = {7, i}, .num_blocks = num_blocks});
    begin_s = system_clock().now_s();
    transfer.post({.sequence = SequenceId(i), .blocks = node.blocks}, tokens);
    while (num_ended < i) std::this_thread::sleep_for(std::chrono::microseconds(200));
    rates.push_back(bytes / (system_clock().now_s() - begin_s) / 1e9);
    std::printf("run %d: plain %.2f GB/s, transfer %.2f GB/s, %.0f %%\n", i, plain_rates.back(), rates.back(),
                100 * rates.back() / plain_rates.back());
  }
  std::printf("%.3f GB: plain %.2f GB/s, transfer %.2f GB/s (medians of %d), %.0f %%\n", bytes / 1e9,
              median(plain_rates), median(rates), runs, 100 * median(rates) / median(plain_rates));
}

}  // namespace
}  // namespace perigee

int main(int argc, char** argv) {
  const double gib = argc > 1 ? std::atof(argv[1]) : 1;
  const int runs = argc > 2 ? std::atoi(argv[2]) : 5;
  perigee::TcpOptions options{.secret = "secret"};
  if (argc > 3) options.streams = std::atoi(argv[3]);
  if (argc > 4) options.piece_bytes = int64_t{std::atoi(argv[4])} << 10;
  if (gib <= 0 || gib > 64 || runs < 1 || options.streams < 1 || options.piece_bytes < 1) {
    std::fprintf(stderr, "usage: transfer_bench [GIB] [RUNS] [STREAMS] [PIECE_KIB]\n");
    return 2;
  }
  perigee::run(gib, runs, options);
  return 0;
}

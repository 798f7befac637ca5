// Bytes over UCX between two processes, over shared memory and over TCP.
#include "kv/ucx_path.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <thread>

#include "base/clock.h"

namespace perigee {
namespace {

constexpr size_t kSizes[] = {1, 1000, 100000, 5 << 20};

std::vector<uint8_t> pattern(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  return bytes;
}

std::unique_ptr<UcxPath> meet(int socket) {
  auto path = UcxPath::create();
  CHECK(path.ok(), path.error().message);
  const std::vector<uint8_t>& mine = (*path)->address();
  const auto size = static_cast<uint32_t>(mine.size());
  CHECK(write(socket, &size, sizeof(size)) == sizeof(size) && write(socket, mine.data(), size) == ssize_t{size});
  uint32_t there = 0;
  CHECK(recv(socket, &there, sizeof(there), MSG_WAITALL) == sizeof(there) && there < 1 << 16);
  std::vector<uint8_t> address(there);
  CHECK(recv(socket, address.data(), there, MSG_WAITALL) == ssize_t{there});
  CHECK((*path)->connect(address).ok());
  // Neither goes before the other has found its memory.
  uint8_t met = 1;
  CHECK(write(socket, &met, 1) == 1 && recv(socket, &met, 1, MSG_WAITALL) == 1);
  return std::move(*path);
}

class UcxPaths : public testing::TestWithParam<const char*> {
 protected:
  // Each side runs in a process of its own, since UCX reads its variables once, and has one end of a socket, so that it
  // sees there when the other process ends.
  template <typename Here, typename There>
  void run(Here&& here, There&& there) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    const pid_t first = start(
        sockets[0], [&] { close(sockets[1]); }, here);
    close(sockets[0]);
    const pid_t second = start(
        sockets[1], [] {}, there);
    close(sockets[1]);
    for (const pid_t child : {first, second}) {
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }
  }
  template <typename Prepare, typename Body>
  pid_t start(int socket, Prepare&& prepare, Body&& body) {
    const pid_t child = fork();
    if (child != 0) return child;
    prepare();
    setenv("UCX_TLS", GetParam(), 1);
    const auto path = meet(socket);
    body(*path, socket);
    _exit(0);
  }
};

TEST_P(UcxPaths, Carry) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  const auto give = [](UcxPath& path, int) {
    for (const size_t size : kSizes) CHECK(path.send(pattern(size), 20, {}).ok(), size);
  };
  const auto take = [](UcxPath& path, int) {
    for (const size_t size : kSizes) {
      std::vector<uint8_t> bytes(size);
      const Status status = path.receive(bytes, 20, {});
      CHECK(status.ok(), size, ": ", status.error().message);
      CHECK(bytes == pattern(size), size);
    }
  };
  run(give, take);
}

constexpr size_t kUnsent = 1 << 20;

bool untouched(const std::vector<uint8_t>& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](uint8_t byte) { return byte == 0; });
}

TEST_P(UcxPaths, SilenceEndsAWait) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  const auto stay = [](UcxPath&, int socket) {
    char end = 0;
    CHECK(recv(socket, &end, 1, MSG_WAITALL) == 0);
  };
  const auto wait = [](UcxPath& path, int) {
    std::vector<uint8_t> bytes(kUnsent);
    CHECK(!path.receive(bytes, 0.2, {}).ok());
    CHECK(!path.receive(bytes, 60, {}).ok(), "a path that has failed is over");
    CHECK(untouched(bytes));
  };
  run(stay, wait);
}

// UCX may not notice it: the connection beside it does.
TEST_P(UcxPaths, APeerThatIsGoneEndsAWait) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  const auto die = [](UcxPath&, int) {};
  const auto wait = [](UcxPath& path, int socket) {
    char end = 0;
    const auto is_over = [&] { return recv(socket, &end, 1, MSG_PEEK | MSG_DONTWAIT) == 0; };
    std::vector<uint8_t> bytes(kUnsent);
    const double begin_s = system_clock().now_s();
    CHECK(!path.receive(bytes, 120, is_over).ok());
    CHECK(system_clock().now_s() - begin_s < 60);
    CHECK(untouched(bytes));
  };
  run(die, wait);
}

TEST_P(UcxPaths, ASenderEndsWithItsReader) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  const auto read_a_part = [](UcxPath& path, int) {
    std::vector<uint8_t> bytes(1000);
    CHECK(path.receive(bytes, 20, {}).ok());
    _exit(0);
  };
  const auto give = [](UcxPath& path, int) {
    CHECK(path.send(pattern(1000), 20, {}).ok());
    const double begin_s = system_clock().now_s();
    CHECK(!path.send(pattern(8 << 20), 1, {}).ok());
    CHECK(system_clock().now_s() - begin_s < 20);
  };
  run(give, read_a_part);
}

// Threads of one process give and take at the same time, over one context: UCX reads UCX_TLS when it makes one, and a
// second one of no transport would not be made.
TEST_P(UcxPaths, ShareAContext) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  constexpr int kPairs = 6, kRounds = 4;
  const auto carry = [] {
    std::unique_ptr<UcxPath> from = *UcxPath::create(), to = *UcxPath::create();
    CHECK(from->connect(to->address()).ok() && to->connect(from->address()).ok());
    for (int i = 0; i < kRounds; ++i) {
      const std::vector<uint8_t> sent = pattern(kUnsent + static_cast<size_t>(i));
      std::vector<uint8_t> bytes(sent.size());
      std::thread giver([&] { CHECK(from->send(sent, 20, {}).ok()); });
      CHECK(to->receive(bytes, 20, {}).ok() && bytes == sent);
      giver.join();
    }
  };
  const pid_t child = fork();
  if (child == 0) {
    setenv("UCX_TLS", GetParam(), 1);
    auto first = UcxPath::create();
    CHECK(first.ok(), first.error().message);
    setenv("UCX_TLS", "none_such", 1);
    std::vector<std::thread> pairs;
    for (int i = 0; i < kPairs; ++i) pairs.emplace_back(carry);
    for (std::thread& pair : pairs) pair.join();
    first->reset();
    CHECK(!UcxPath::create().ok(), "the context ends with the last path");
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

INSTANTIATE_TEST_SUITE_P(Transports, UcxPaths, testing::Values("tcp", "sm,self", "sm,tcp,self"),
                         [](const auto& info) { return "Tls" + std::to_string(info.index); });

}  // namespace
}  // namespace perigee

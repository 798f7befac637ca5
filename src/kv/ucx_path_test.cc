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
  // `peer` runs in a process of its own, and so does each case: UCX reads its variables once.
  template <typename Here, typename There>
  void run(Here&& here, There&& there) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    const pid_t children[2] = {start(sockets[0], here), start(sockets[1], there)};
    for (const pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) < 2) << status;
    }
    close(sockets[0]);
    close(sockets[1]);
  }
  template <typename Body>
  pid_t start(int socket, Body&& body) {
    const pid_t child = fork();
    if (child != 0) return child;
    setenv("UCX_TLS", GetParam(), 1);
    if (!UcxPath::check().ok()) _exit(1);
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

// Silence, and a peer that is gone, end the wait; what was to be filled is never touched after that.
TEST_P(UcxPaths, EndWithAPeerThatDoesNotSend) {
  if (const Status built = UcxPath::check(); !built.ok()) GTEST_SKIP() << built.error().message;
  const auto die = [](UcxPath&, int) {};
  const auto wait = [](UcxPath& path, int socket) {
    char end = 0;
    std::vector<uint8_t> bytes(1 << 20);
    const double begin_s = system_clock().now_s();
    const auto is_over = [&] { return recv(socket, &end, 1, MSG_PEEK | MSG_DONTWAIT) == 0; };
    CHECK(!path.receive(bytes, 0.2, {}).ok());
    CHECK(!path.receive(bytes, 30, is_over).ok(), "a path that has failed is over");
    CHECK(system_clock().now_s() - begin_s < 20);
    CHECK(std::count(bytes.begin(), bytes.end(), 0) == 1 << 20);
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

INSTANTIATE_TEST_SUITE_P(Transports, UcxPaths, testing::Values("tcp", "sm,self", "sm,tcp,self"),
                         [](const auto& info) { return "Tls" + std::to_string(info.index); });

}  // namespace
}  // namespace perigee

// The n-th allocation of the server fails, for each n until a request needs no more: nothing ends the process, every
// client is answered or sees its connection close, and the next request is served.
#include <fmt/core.h>

#include "base/eventually.h"
#include "base/log.h"
#include "base/test_allocations.h"
#include "server/api_fixture.h"

namespace perigee {
namespace {

// It has memory, except in sinks: those are the server's. Its thread is known from its first sink on.
class BackendWithMemory : public Backend {
 public:
  explicit BackendWithMemory(std::shared_ptr<FakeBackend> inner) : inner_(std::move(inner)) {}
  Result<RequestId> submit(EngineRequest request, OutputSink sink) override {
    OutputSink in_server = [sink = std::move(sink)](OutputChunk&& chunk) {
      allocations::exempt = false;
      sink(std::move(chunk));
      allocations::exempt = true;
    };
    const ExemptAllocations here;
    return inner_->submit(std::move(request), std::move(in_server));
  }
  void cancel(RequestId request, int32_t choice, FinishReason reason) override {
    const ExemptAllocations here;
    inner_->cancel(request, choice, reason);
  }
  void release(const RemotePrefix& remote) override { inner_->release(remote); }
  EngineStats stats() const override { return inner_->stats(); }
  BackendInfo info() const override { return inner_->info(); }

 private:
  const std::shared_ptr<FakeBackend> inner_;
};

class NoMemoryTest : public ApiTest {
 protected:
  NoMemoryTest() {
    options_.reply = [](const std::vector<int32_t>&) { return std::vector<int32_t>(3, 'a'); };
    config_.http.sse_comment_s = 0.02;  // what is abandoned ends then
    set_log_level(LogLevel::kError);
    start();
    server_->set_ready(std::make_shared<BackendWithMemory>(backend_));
  }
  ~NoMemoryTest() override { set_log_level(LogLevel::kInfo); }
  // Status of the reply, 0 for a connection that closed without one.
  int answer(const std::string& path, const std::string& body) {
    TestClient client(server_->port());
    if (!client.send(fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{}",
                                 path, body.size(), body)))
      return 0;
    while (client.read_some()) {
    }
    CHECK(client.ended(), "a client was left waiting: ", path, " ", body, " ", client.text());
    return client.text().size() < 12 ? 0 : std::atoi(client.text().c_str() + 9);
  }
  // How many allocations it takes to answer, which are failed one after the other, `count` at once.
  void fail_each(const std::string& path, const std::string& body, int64_t count) {
    const ExemptAllocations test;
    ASSERT_EQ(answer(path, body), 200);
    int64_t first = 0;
    for (bool failed = true; failed && first < 20'000; ++first) {
      int status = 0;
      {
        const FailingAllocations failing(first, count);
        status = answer(path, body);
        failed = failing.any_failed();
      }
      ASSERT_TRUE(status == 0 || status == 200 || status == 500 || status == 503) << status << " at " << first;
      ASSERT_TRUE(eventually([&] { return backend_->running() == 0; })) << "at " << first;
      if (first % 16 == 0) {
        ASSERT_EQ(answer(path, body), 200) << "after " << first;
      }
    }
    EXPECT_GT(first, 50) << "hardly anything was allocated";
    EXPECT_EQ(answer(path, body), 200);
  }
};

TEST_F(NoMemoryTest, OfAWholeReply) {
  fail_each("/v1/completions", R"({"prompt":"x","max_tokens":5,"n":2})", 1);
}

TEST_F(NoMemoryTest, OfAStream) {
  fail_each("/v1/completions", R"({"prompt":"x","max_tokens":5,"stream":true})", 1);
}

TEST_F(NoMemoryTest, OfAChatForAWhile) {
  fail_each("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":5,"stream":true})", 7);
}

}  // namespace
}  // namespace perigee

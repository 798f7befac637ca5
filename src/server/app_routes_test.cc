// Methods, keys and probes of the routes, without sockets.
#include <gtest/gtest.h>

#include "server/app.h"
#include "server/fake_backend.h"

namespace perigee {
namespace {

struct Reply : HttpReply {
  std::string header(const std::string& name) const {
    for (const auto& [key, value] : headers)
      if (key == name) return value;
    return "";
  }
};

// Keeps the reply; runs posted work at once.
class ReplyExchange : public Exchange {
 public:
  void respond(HttpReply given) override { static_cast<HttpReply&>(reply) = std::move(given); }
  void begin_stream(HttpHeaders) override {}
  void write(std::string) override {}
  void finish(bool) override {}
  void on_disconnect(std::function<void()>) override {}
  void post(std::function<void()> work) override { work(); }
  Reply reply;
};

class AppRoutes : public testing::Test {
 protected:
  void start(std::vector<std::string> keys = {}) {
    AppConfig config;
    config.served_names = {"tiny"};
    config.api_keys = std::move(keys);
    app_ = std::make_unique<App>(std::move(config), ModelText::make(nullptr, nullptr, false, {}));
    app_->set_ready(std::make_shared<FakeBackend>(FakeOptions()));
  }
  Reply ask(const std::string& method, const std::string& path) {
    const auto exchange = std::make_shared<ReplyExchange>();
    HttpRequest request;
    request.method = method;
    request.path = path;
    app_->handle(exchange, request);
    return exchange->reply;
  }
  std::unique_ptr<App> app_;
};

TEST_F(AppRoutes, WrongMethodsAreToldTheRightOnes) {
  start();
  struct Case {
    const char *method, *path, *allow;
  };
  for (const auto& [method, path, allow] :
       {Case{"GET", "/v1/completions", "POST, OPTIONS"}, Case{"DELETE", "/v1/chat/completions", "POST, OPTIONS"},
        Case{"POST", "/v1/models", "GET, HEAD, OPTIONS"}, Case{"POST", "/v1/models/tiny", "GET, HEAD, OPTIONS"},
        Case{"PUT", "/ping", "GET, HEAD, POST, OPTIONS"}, Case{"POST", "/livez", "GET, HEAD, OPTIONS"}}) {
    const Reply reply = ask(method, path);
    EXPECT_EQ(reply.status, 405) << method << path;
    EXPECT_EQ(reply.header("Allow"), allow) << method << path;
    const Reply options = ask("OPTIONS", path);
    EXPECT_EQ(options.status, 200) << path;
    EXPECT_EQ(options.header("Allow"), allow) << path;
    EXPECT_EQ(options.body, "");
  }
  EXPECT_EQ(ask("OPTIONS", "/nothing").status, 404);
  EXPECT_EQ(ask("HEAD", "/v1/models").status, 200);
}

TEST_F(AppRoutes, TheSchemeOfAKeyIsOfAnyCase) {
  start({"secret"});
  HttpRequest request;
  request.method = "GET";
  request.path = "/v1/models";
  for (const auto& [value, admitted] : std::vector<std::pair<const char*, bool>>{{"Bearer secret", true},
                                                                                 {"bearer secret", true},
                                                                                 {"BEARER  secret", true},
                                                                                 {"Bearer SECRET", false},
                                                                                 {"Bearersecret", false},
                                                                                 {"Basic secret", false},
                                                                                 {"Bearer", false},
                                                                                 {"secret", false}}) {
    request.headers = {{"Authorization", value}};
    EXPECT_EQ(!app_->check_head(request).has_value(), admitted) << value;
  }
}

TEST_F(AppRoutes, ProbesAreAnsweredApartAndKeepTheirKeys) {
  start({"secret"});
  const auto probe = [&](const char* method, const char* path, const char* key = nullptr) {
    HttpRequest request;
    request.method = method;
    request.path = path;
    if (key != nullptr) request.headers = {{"Authorization", key}};
    const auto reply = app_->probe(request);
    return reply ? reply->status : 0;
  };
  for (const char* path : {"/livez", "/readyz", "/health", "/metrics"}) {
    EXPECT_EQ(probe("GET", path), 200) << path;
    EXPECT_EQ(probe("HEAD", path), 200) << path;
    EXPECT_EQ(probe("POST", path), 0) << path;
  }
  EXPECT_EQ(probe("GET", "/ping"), 0);
  EXPECT_EQ(probe("GET", "/ping", "Bearer secret"), 200);
  EXPECT_EQ(probe("POST", "/ping", "Bearer secret"), 200);
  EXPECT_EQ(probe("GET", "/v1/models", "Bearer secret"), 0);
  app_->begin_drain();
  EXPECT_EQ(probe("GET", "/readyz"), 503);
  EXPECT_EQ(probe("GET", "/livez"), 200);
}

}  // namespace
}  // namespace perigee

// Test only: the API on a loopback port over a scripted backend. A test sets options_ and config_, then calls start().
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/fake_backend.h"
#include "server/server.h"
#include "server/test_client.h"
#include "text/test_vocabulary.h"

namespace perigee {

// Ids of test_tokenizer() without merges: bytes are themselves, specials from 256.
constexpr int32_t kSectionBegin = 267, kSectionEnd = 268, kCallBegin = 269, kArgumentBegin = 270, kCallEnd = 271,
                  kThink = 278, kEndThink = 279;

inline std::vector<int32_t> ids_of(std::string_view text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}
inline std::vector<int32_t> joined(const std::vector<std::vector<int32_t>>& parts) {
  std::vector<int32_t> ids;
  for (const auto& part : parts) ids.insert(ids.end(), part.begin(), part.end());
  return ids;
}

class ApiTest : public testing::Test {
 protected:
  void start(const std::vector<int32_t>& reply) {
    options_.reply = [reply](const std::vector<int32_t>&) { return reply; };
    start();
  }
  void start() {
    config_.http.port = 0;
    config_.model_path = "/models/tiny";
    if (config_.served_names.empty()) config_.served_names = {"tiny", "alias"};
    const ModelText::ChatEncoder chat = [](const Json& messages, const Json&, const Json& kwargs, PromptEnd,
                                           size_t) -> Result<std::vector<int32_t>> {
      std::vector<int32_t> ids = ids_of(messages.as_array().back().find("content")->as_string());
      const Json* thinking = kwargs.find("thinking");
      ids.push_back(260);  // <|im_assistant|>
      ids.push_back(kThink);
      if (thinking != nullptr && *thinking == Json(false)) ids.push_back(kEndThink);
      return ids;
    };
    const auto text = with_tokenizer_ ? ModelText::make(test_tokenizer(), chat, true, {})
                                      : ModelText::make(nullptr, nullptr, false, {});
    auto server = Server::start(config_, text);
    ASSERT_TRUE(server.ok()) << server.error().message;
    server_ = std::move(*server);
    backend_ = std::make_shared<FakeBackend>(options_);
    if (ready_) server_->set_ready(backend_);
  }
  TestClient::Reply post(const std::string& path, const std::string& body, const std::string& headers = "") {
    TestClient client(server_->port());
    return client.post(path, body, headers);
  }
  Json choice(const std::string& path, const std::string& body) {
    const auto reply = post(path, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    const Json json = reply.json();
    return json.find("choices") == nullptr ? Json() : json.find("choices")->as_array()[0];
  }
  void TearDown() override {
    server_.reset();
    backend_.reset();
  }

  ServerConfig config_;
  FakeOptions options_;
  bool with_tokenizer_ = true;
  bool ready_ = true;
  std::shared_ptr<FakeBackend> backend_;
  std::unique_ptr<Server> server_;
};

}  // namespace perigee

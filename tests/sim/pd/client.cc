#include "sim/pd/client.h"

#include <utility>

#include "base/json.h"

namespace perigee::sim {

// INV-6: no token that the request would not get from one node.
void Client::take_ids(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    const size_t index = ids_.size();
    world_.judge.require(index < expected_.ids.size() && expected_.ids[index] == id, "client ", number_, " gets ", id,
                         " as its output ", index, ", which is not what one node gives");
    ids_.push_back(id);
    world_.note(static_cast<uint64_t>(id));
  }
}

// INV-3
void Client::end() {
  world_.judge.require(!ended_, "client ", number_, " is answered twice");
  ended_ = true;
  callback_ = nullptr;
}

void Client::end_well(const std::string& finish) {
  end();
  well_ = true;
  const char* expected = expected_.finish == FinishReason::kStop ? "stop" : "length";
  world_.judge.require(
      expected_.finish != FinishReason::kError && ids_.size() == expected_.ids.size() && finish == expected, "client ",
      number_, " gets ", ids_.size(), " ids and '", finish, "', one node gives ", expected_.ids.size(), " and '",
      expected, "'");
  world_.count("a client: whole reply");
  world_.trace("client ", number_, " has its reply");
}

void Client::end_badly(const std::string& why) {
  end();
  world_.judge.require(tolerates_ || expected_.finish == FinishReason::kError, "client ", number_,
                       " gets an error though nothing went wrong: ", why);
  world_.count("a client: an error");
  world_.trace("client ", number_, " gets an error: ", why);
}

void Client::respond(HttpReply reply) {
  if (left_) return;
  world_.judge.require(!streams_, "client ", number_, " gets two replies");
  if (reply.status != 200) return end_badly(str_cat(reply.status, " ", reply.body));
  const auto body = parse_json(reply.body);
  world_.judge.require(body.ok(), "a reply that is not JSON");
  const Json* ids = body->find("ids");
  world_.judge.require(ids != nullptr, "a reply without ids");
  std::vector<int32_t> got;
  for (const Json& id : ids->as_array()) got.push_back(static_cast<int32_t>(id.as_int()));
  take_ids(got);
  end_well(body->find("finish")->as_string());
}

void Client::begin_stream(HttpHeaders) {
  world_.judge.require(!streams_, "client ", number_, " gets two streams");
  streams_ = true;
}

void Client::write(std::string data) {
  if (left_) return;
  text_ += data;
  constexpr std::string_view kData = "data: ";
  for (size_t at = text_.find("\n\n"); at != std::string::npos; at = text_.find("\n\n")) {
    const std::string event = text_.substr(0, at);
    text_.erase(0, at + 2);
    if (event.empty()) continue;
    world_.judge.require(event.starts_with(kData), "client ", number_, " gets no event: ", event);
    if (event == "data: [DONE]") continue;
    const auto body = parse_json(std::string_view(event).substr(kData.size()));
    world_.judge.require(body.ok(), "an event that is not JSON");
    if (const Json* ids = body->find("ids")) {
      std::vector<int32_t> got;
      for (const Json& id : ids->as_array()) got.push_back(static_cast<int32_t>(id.as_int()));
      take_ids(got);
    }
    if (const Json* finish = body->find("finish")) finish_ = finish->as_string();
    if (body->find("error") != nullptr) finish_ = "error";
  }
}

void Client::finish(bool close) {
  if (left_) return;
  if (!close && finish_ != "error" && !finish_.empty()) return end_well(finish_);
  end_badly(finish_.empty() ? "a stream that breaks off" : finish_);
}

void Client::leave() {
  if (ended_ || left_) return;
  world_.count(streams_ ? "a client left a stream" : "a client left before its reply");
  world_.trace("client ", number_, " leaves");
  left_ = true;
  const std::function<void()> callback = std::exchange(callback_, nullptr);
  end();
  if (callback) callback();
}

}  // namespace perigee::sim

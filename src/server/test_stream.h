// Test only: server-sent events put together as a client does. A malformed event fails the test.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace perigee {

// What a client of a stream puts together.
struct Streamed {
  std::string text, reasoning, content, arguments, call_id, name, finish;
  Json stop_reason, usage, error;
  std::vector<std::string> tokens;
  std::vector<Json> top_logprobs;
  int num_chunks = 0, num_roles = 0, num_usages = 0;
  bool done = false;
};

inline std::string string_at(const Json& object, std::string_view key) {
  const Json* value = object.find(key);
  return value != nullptr && value->is_string() ? value->as_string() : "";
}

inline void take_choice(const Json& choice, Streamed& out) {
  out.text += string_at(choice, "text");
  if (const std::string finish = string_at(choice, "finish_reason"); !finish.empty()) {
    out.finish = finish;
    out.stop_reason = *choice.find("stop_reason");
  }
  if (const Json* logprobs = choice.find("logprobs"); logprobs != nullptr && logprobs->find("tokens") != nullptr) {
    for (const Json& token : logprobs->find("tokens")->as_array()) out.tokens.push_back(token.as_string());
    for (const Json& top : logprobs->find("top_logprobs")->as_array()) out.top_logprobs.push_back(top);
  }
  const Json* delta = choice.find("delta");
  if (delta == nullptr) return;
  out.num_roles += delta->find("role") != nullptr;
  out.reasoning += string_at(*delta, "reasoning_content");
  out.content += string_at(*delta, "content");
  if (const Json* calls = delta->find("tool_calls"))
    for (const Json& call : calls->as_array()) {
      out.call_id += string_at(call, "id");
      out.name += string_at(*call.find("function"), "name");
      out.arguments += string_at(*call.find("function"), "arguments");
    }
}

struct StreamEvents {
  std::vector<Json> events;
  bool done = false;  // [DONE] came, last
};

inline StreamEvents events_of(std::string_view body) {
  StreamEvents out;
  while (!body.empty()) {
    const size_t end = body.find("\n\n");
    EXPECT_NE(end, std::string_view::npos) << "an event without its blank line";
    if (end == std::string_view::npos) break;
    std::string_view event = body.substr(0, end);
    body.remove_prefix(end + 2);
    if (event.starts_with(':')) continue;
    EXPECT_TRUE(event.starts_with("data: ")) << event;
    event.remove_prefix(6);
    EXPECT_FALSE(out.done) << "an event after [DONE]";
    if (event == "[DONE]") {
      out.done = true;
      continue;
    }
    auto json = parse_json(event);
    EXPECT_TRUE(json.ok()) << event;
    if (!json.ok()) break;
    out.events.push_back(std::move(*json));
  }
  return out;
}

inline Streamed read_stream(std::string_view body) {
  const StreamEvents stream = events_of(body);
  Streamed out;
  out.done = stream.done;
  for (const Json& event : stream.events) {
    if (const Json* error = event.find("error")) {
      out.error = *error;
      continue;
    }
    ++out.num_chunks;
    if (const Json* usage = event.find("usage")) {
      out.usage = *usage;
      ++out.num_usages;
    }
    for (const Json& choice : event.find("choices")->as_array()) take_choice(choice, out);
  }
  return out;
}

}  // namespace perigee

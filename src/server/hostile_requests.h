// Test only: requests that cost far more to read than to send, for edge_bench and the tests. All must be refused.
#pragma once

#include <fmt/core.h>

#include <functional>
#include <string>
#include <vector>

#include "base/result.h"

namespace perigee {

struct HostileRequest {
  const char* name;
  const char* path;
  std::function<std::string()> body;
};

// prefix + piece(0) + "," + piece(1) … up to about `bytes`, + suffix
inline std::string hostile_list(const char* prefix, const std::function<std::string(size_t)>& piece, size_t bytes,
                                const char* suffix) {
  std::string out = prefix;
  out.reserve(bytes + 64);
  for (size_t i = 0; out.size() < bytes; ++i) out.append(i > 0 ? "," : "").append(piece(i));
  return out + suffix;
}

inline std::string repeated(std::string_view piece, size_t bytes) {
  std::string out;
  out.reserve(bytes + piece.size());
  while (out.size() < bytes) out += piece;
  return out;
}

inline std::string nested_tools() {
  std::string inner = R"({"type":"object","properties":{)";
  for (int i = 0; i < 4000; ++i) inner += fmt::format("{}\"p{}\":{{}}", i > 0 ? "," : "", i);
  inner += "}}";
  for (int level = 0; level < 50; ++level)
    inner = fmt::format("{}{}}}}}", R"({"type":"object","properties":{"a":)", inner);
  std::string tool = fmt::format("{}{}}}}}", R"({"type":"function","function":{"name":"f","parameters":)", inner);
  return hostile_list(R"({"min_tokens":2,"max_tokens":1,"messages":[{"role":"user","content":"x"}],"tools":[)",
                      [&](size_t) { return tool; }, 3u << 20, "]}");
}

// Bodies of `size` bytes, and some of a fixed smaller size.
inline std::vector<HostileRequest> hostile_requests(size_t size) {
  const char* completions = "/v1/completions";
  const char* chat = "/v1/chat/completions";
  const auto member = [](const char* name) { return [name](size_t i) { return fmt::format("\"{}{}\":0", name, i); }; };
  const auto number = [](size_t i) { return std::to_string(i % 1000); };
  return {
      {"template variables", chat,
       [=] {
         return hostile_list(R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{)", member("k"),
                             1u << 20, "}}");
       }},
      {"logit_bias of millions", completions,
       [=] { return hostile_list(R"({"prompt":"x","logit_bias":{)", member(""), size, "}}"); }},
      {"unknown members", completions, [=] { return hostile_list(R"({"prompt":"x",)", member("u"), size, "}"); }},
      {"prompt of text", completions, [=] { return R"({"prompt":")" + repeated("word ", size) + "\"}"; }},
      {"prompt of escapes", completions, [=] { return R"({"prompt":")" + repeated("\\u00e9", size) + "\"}"; }},
      {"lone surrogates", completions, [=] { return R"({"prompt":")" + repeated("\\ud800", size) + "\"}"; }},
      {"prompt of ids", completions, [=] { return hostile_list(R"({"prompt":[)", number, size, "]}"); }},
      {"prompts in a list", completions,
       [=] { return hostile_list(R"({"prompt":[)", [](size_t) { return "\"x\""; }, size, "]}"); }},
      {"one number", completions, [=] { return R"({"prompt":"x","seed":)" + repeated("1", size) + "}"; }},
      {"one key", completions, [=] { return R"({"prompt":"x",")" + repeated("k", size) + "\":1}"; }},
      {"stop strings", completions,
       [=] { return hostile_list(R"({"prompt":"x","stop":[)", [](size_t) { return "\"s\""; }, size, "]}"); }},
      {"brackets", completions, [=] { return R"({"prompt":"x","a":)" + repeated("[", size); }},
      {"empty arrays", completions,
       [=] { return hostile_list(R"({"prompt":"x","a":[)", [](size_t) { return "[]"; }, size, "]}"); }},
      {"a key twice", completions,
       [=] {
         return hostile_list(R"({"prompt":"x","a":{)", [](size_t i) { return fmt::format("\"{}\":0", i % 4000); }, size,
                             "}}");
       }},
      {"messages", chat,
       [=] {
         return hostile_list(R"({"messages":[)", [](size_t) { return R"({"role":"user","content":"x"})"; }, size, "]}");
       }},
      {"a message of text", chat,
       [=] { return R"({"messages":[{"role":"user","content":")" + repeated("word ", size) + "\"}]}"; }},
      {"nested tools", chat, nested_tools},
      {"a wrong field after a long prompt", completions,
       [=] { return R"({"prompt":")" + repeated("word ", 1u << 20) + R"(","min_tokens":2,"max_tokens":1})"; }},
      {"an unknown model after a long prompt", completions,
       [=] { return R"({"prompt":")" + repeated("word ", 1u << 20) + R"(","model":"other"})"; }},
      {"tokenize", "/tokenize", [=] { return R"({"prompt":")" + repeated("word ", size) + "\"}"; }},
      {"detokenize", "/detokenize", [=] { return hostile_list(R"({"tokens":[)", number, size, "]}"); }},
  };
}

}  // namespace perigee

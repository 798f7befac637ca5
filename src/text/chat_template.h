// ChatTemplate: the model's own chat template, run by a bounded interpreter of the part of Jinja2 that chat
// templates use.
//
// It prints what python3-jinja2 prints in the environment of transformers (trim_blocks, lstrip_blocks, loop controls,
// an immutable sandbox, tojson without ASCII escapes), byte for byte. A template comes with a model file and its
// context from the network, so neither is trusted: there are no Python attributes, imports or side effects, and every
// source of growth has a cap; running into one is an error that names it. Knows nothing of messages or tokens.
//
// Left out, each an error when met: extends, include, import, block, call, filter and autoescape statements, recursive
// loops, macros inside loops or macros, printf-style %, integers over 64 bits. `a.items` without a call is the member
// "items", never a Python method.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/result.h"

namespace perigee {

struct TemplateLimits {
  size_t max_steps = 1'000'000;        // nodes evaluated, plus a share for long strings and lists
  size_t max_output_bytes = 4u << 20;  // of the rendered text
  size_t max_value_bytes = 64u << 20;  // of all strings and lists created on the way, together
  size_t max_call_depth = 64;          // macros within macros
};

constexpr size_t kMaxTemplateBytes = 1u << 20;

struct TemplateProgram;

class ChatTemplate {
 public:
  // Errors: kTooLarge over kMaxTemplateBytes; kBadInput with the line otherwise.
  static Result<ChatTemplate> parse(std::string source);

  // The text for the variables in `context`, an object. strftime_now(format) gives the context's string
  // "strftime_now", so that a render is a pure function. Errors: kBadInput for what Jinja2 raises, with the line and
  // the text of raise_exception(); kTooLarge naming the cap that was met. Safe to call from several threads.
  Result<std::string> render(const Json& context, const TemplateLimits& limits = {}) const;

  // Whether the template reads a variable of this name anywhere.
  bool mentions(std::string_view variable) const;

 private:
  explicit ChatTemplate(std::shared_ptr<const TemplateProgram> program) : program_(std::move(program)) {}
  std::shared_ptr<const TemplateProgram> program_;
};

}  // namespace perigee

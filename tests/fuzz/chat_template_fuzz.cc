// A chat template and its context, both hostile: the bytes up to the first NUL are the template, the rest the context
// as JSON (an empty object when it is none). Small limits keep each run short; no input may crash, leak or go over
// them.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "text/chat_prompt.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  const std::string source(input.substr(0, end));
  const std::string_view rest = end == std::string_view::npos ? std::string_view() : input.substr(end + 1);
  const auto parsed = perigee::parse_json(rest);
  const perigee::Json context = parsed.ok() && parsed->is_object() ? *parsed : perigee::Json(perigee::Json::Object{});

  perigee::TemplateLimits limits;
  limits.max_steps = 20'000;
  limits.max_output_bytes = 1u << 16;
  limits.max_value_bytes = 1u << 20;
  const auto compiled = perigee::ChatTemplate::parse(source);
  if (compiled.ok()) {
    const auto text = compiled->render(context, limits);
    CHECK(!text.ok() || text->size() <= limits.max_output_bytes);
    const auto again = compiled->render(context, limits);
    CHECK(text.ok() == again.ok() && (!text.ok() || *text == *again), "two renders differ");
  }

  const auto prompt = perigee::ChatPrompt::create(source);
  const perigee::Json* messages = context.find("messages");
  if (!prompt.ok() || !messages) return 0;
  perigee::ChatPromptOptions options;
  options.limits = limits;
  const perigee::Json* tools = context.find("tools");
  const auto same = [](std::string_view text) { return std::string(text); };
  (void)prompt->render(*messages, tools ? *tools : perigee::Json(), options, same);
  return 0;
}

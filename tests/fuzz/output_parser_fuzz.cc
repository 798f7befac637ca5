// Output parser, detokenizer and stop strings over arbitrary token streams. INPUT = a byte of options, then a token for
// each byte: control characters are special tokens (11 to 23 the markers), every other byte is itself.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "text/output_parser.h"
#include "text/stop_strings.h"
#include "text/test_vocabulary.h"

namespace perigee {
namespace {

bool is_valid_utf8(std::string_view text) {
  std::string repaired;
  Utf8Repair repair;
  repair.push(text, repaired);
  repair.finish(repaired);
  return repaired == text;
}

void check_events(std::span<const OutputEvent> events, OutputParserOptions options) {
  for (const OutputEvent& event : events) {
    CHECK(is_valid_utf8(event.text));
    const bool is_call = event.kind == OutputEvent::Kind::kToolCall;
    CHECK(event.text.empty() == is_call);
    CHECK(!is_call || (!event.name.empty() && !event.call_id.empty()));
    CHECK(!is_call || !options.suppress_tools);
  }
  const ParsedOutput whole = collect(events);
  std::vector<std::string> arguments(whole.calls.size());
  for (const OutputEvent& event : events)
    if (event.kind == OutputEvent::Kind::kArguments) arguments.at(event.call_index) += event.text;
  for (size_t i = 0; i < arguments.size(); ++i) CHECK(arguments[i] == whole.calls[i].arguments);
}

void check_text(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip) {
  Detokenizer detokenizer(tokenizer, skip);
  StopStrings stops({"ab", "aab\xC3\xA9", "<think>"}, false);
  std::string joined, emitted;
  for (const int32_t id : ids) {
    const std::string piece = detokenizer.push(id);
    joined += piece;
    stops.push(piece, emitted);
  }
  joined += detokenizer.finish();
  stops.finish(emitted);
  CHECK(joined == decode(tokenizer, ids, skip));
  CHECK(joined.starts_with(emitted));
  CHECK(emitted.find("ab") == std::string::npos);
}

}  // namespace
}  // namespace perigee

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace perigee;
  static const auto kTokenizer = test_tokenizer();
  if (size == 0) return 0;
  const OutputParserOptions options = {.thinking = (data[0] & 1) != 0,
                                       .starts_in_reasoning = (data[0] & 2) != 0,
                                       .parse_tools = (data[0] & 4) != 0,
                                       .suppress_tools = (data[0] & 8) != 0,
                                       .skip_special_tokens = (data[0] & 16) == 0};
  std::vector<int32_t> ids;
  for (size_t i = 1; i < size; ++i) {
    const bool ordinary = data[i] >= 32 || data[i] == '\t' || data[i] == '\n';
    ids.push_back(ordinary ? data[i] : 256 + data[i]);
  }
  OutputParser parser(*kTokenizer, options);
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) parser.push(id, events);
  parser.finish(events);
  check_events(events, options);
  check_text(*kTokenizer, ids, options.skip_special_tokens);
  prompt_leaves_reasoning_open(*kTokenizer, ids);
  return 0;
}

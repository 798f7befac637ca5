#include "text/output_parser.h"

#include <algorithm>
#include <utility>

#include "base/utf8.h"
#include "text/unicode.h"

// Markers without a rule in vLLM's table, and what happens here:
//   <think> in content                      reasoning (again): K2-Thinking opens its thinking itself
//   call begin in reasoning or content      begins a call, as if the section had begun
//   call begin in a header or in arguments  the model forgot the end: the old call ends (a header is dropped), a new
//   one begins call or section end in a header         the call is dropped think markers in arguments              text
//   (a program that the model writes may contain them) every other one                         swallowed

namespace perigee {
namespace {

constexpr std::string_view kMarkerTexts[] = {
    "",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
};

// Bytes of white space (Python's notion) at the start of valid UTF-8.
size_t leading_space(std::string_view text) {
  size_t pos = 0;
  while (pos < text.size()) {
    const Utf8Char c = utf8_at(text, pos);
    if (!is_python_space(c.code_point)) break;
    pos += c.length;
  }
  return pos;
}

// Where the white space at the end of valid UTF-8 begins.
size_t trailing_space_begin(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t begin = end - 1;
    while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_python_space(utf8_at(text, begin).code_point)) break;
    end = begin;
  }
  return end;
}

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(leading_space(text));
  return text.substr(0, trailing_space_begin(text));
}

struct Header {
  std::string_view id;
  std::string_view name;
};

// "functions.get_weather:0": anything, a colon, digits. The name is what stands before the first colon, without the
// prefix.
std::optional<Header> parse_header(std::string_view text) {
  const std::string_view id = trimmed(text);
  const size_t last_colon = id.rfind(':');
  if (last_colon == std::string_view::npos || last_colon == 0 || last_colon + 1 == id.size()) return std::nullopt;
  const std::string_view digits = id.substr(last_colon + 1);
  if (!std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return std::nullopt;
  constexpr std::string_view kPrefix = "functions.";
  std::string_view name = id.substr(0, id.find(':'));
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  if (name.empty()) return std::nullopt;
  return Header{id, name};
}

}  // namespace

OutputParser::OutputParser(const Tokenizer& tokenizer, OutputParserOptions options)
    : tokenizer_(tokenizer), options_(options), tools_(options.parse_tools || options.suppress_tools) {
  for (size_t i = 0; i < std::size(kMarkerTexts); ++i)
    marker_ids_[i] = i == 0 ? -1 : tokenizer.special_id(kMarkerTexts[i]).value_or(-1);
  state_ = options.thinking && options.starts_in_reasoning ? State::kReasoning : State::kContent;
}

OutputParser::Marker OutputParser::marker_of(int32_t id) const {
  if (!tokenizer_.is_named_special(id)) return Marker::kNone;
  const auto found = std::find(std::begin(marker_ids_), std::end(marker_ids_), id);
  const auto marker = found == std::end(marker_ids_) ? Marker::kNone : static_cast<Marker>(found - marker_ids_);
  const bool is_think = marker == Marker::kThink || marker == Marker::kEndThink;
  if (is_think && state_ == State::kArguments) return Marker::kNone;
  return (is_think ? options_.thinking : tools_) ? marker : Marker::kNone;
}

void OutputParser::push(int32_t id, Events& out) {
  if (done_) return;
  const Marker marker = marker_of(id);
  if (marker == Marker::kThink || marker == Marker::kEndThink) return on_think_marker(marker, out);
  if (marker != Marker::kNone) return on_tool_marker(marker, out);
  num_reasoning_ids_ += state_ == State::kReasoning;
  if (options_.skip_special_tokens && tokenizer_.is_skipped(id)) return;
  std::string text;
  repair_.push(tokenizer_.bytes(id), text);
  on_text(text, out);
}

void OutputParser::on_think_marker(Marker marker, Events& out) {
  if (marker == Marker::kThink && state_ == State::kContent) enter(State::kReasoning, out);
  if (marker == Marker::kEndThink && state_ == State::kReasoning) enter(State::kContent, out);
}

void OutputParser::on_tool_marker(Marker marker, Events& out) {
  const bool outside = state_ == State::kReasoning || state_ == State::kContent;
  switch (marker) {
    case Marker::kSectionBegin:
      if (outside) enter(State::kPreamble, out);
      return;
    case Marker::kSectionEnd:
      if (!outside) enter(State::kPreamble, out);
      return;
    case Marker::kCallBegin: return enter(State::kName, out);
    case Marker::kArgumentBegin:
      if (state_ == State::kName) enter(State::kArguments, out);
      return;
    case Marker::kCallEnd:
      if (state_ == State::kName || state_ == State::kArguments) enter(State::kBetween, out);
      return;
    default: return;
  }
}

void OutputParser::enter(State next, Events& out) {
  std::string tail;
  repair_.finish(tail);
  on_text(tail, out);
  if (state_ == State::kArguments) end_call(out);
  held_.clear();
  if (next == State::kArguments) begin_call(out);
  header_.clear();
  state_ = next;
}

void OutputParser::begin_call(Events& out) {
  const std::optional<Header> header = parse_header(header_);
  call_open_ = header && !options_.suppress_tools;
  arguments_started_ = false;
  if (!call_open_) return;
  out.push_back({OutputEvent::Kind::kToolCall, num_calls_++, "", std::string(header->id), std::string(header->name)});
}

// A client that joins the pieces must get what the whole reply says, so a call without arguments gets its `{}` here.
void OutputParser::end_call(Events& out) {
  if (call_open_ && !arguments_started_) emit(OutputEvent::Kind::kArguments, "{}", out);
  done_ = done_ || (call_open_ && options_.one_call);
  call_open_ = false;
}

void OutputParser::on_text(std::string_view text, Events& out) {
  if (text.empty()) return;
  switch (state_) {
    case State::kReasoning: return hold_trailing_space(OutputEvent::Kind::kReasoning, text, out);
    case State::kContent: return on_content(text, out);
    case State::kName: header_ += text; return;
    case State::kArguments:
      if (!call_open_) return;
      if (!arguments_started_) text.remove_prefix(leading_space(text));
      arguments_started_ = arguments_started_ || !text.empty();
      return hold_trailing_space(OutputEvent::Kind::kArguments, text, out);
    case State::kPreamble:
    case State::kBetween: return;
  }
}

// White space at the end stays back: it goes out before the next text, or never.
void OutputParser::hold_trailing_space(OutputEvent::Kind kind, std::string_view text, Events& out) {
  const size_t end = trailing_space_begin(text);
  if (end > 0) {
    held_ += text.substr(0, end);
    emit(kind, std::exchange(held_, ""), out);
  }
  held_ += text.substr(end);
}

// Content is kept as it is, except that white space alone in front of a tool section or of reasoning is none.
void OutputParser::on_content(std::string_view text, Events& out) {
  content_started_ = content_started_ || leading_space(text) < text.size();
  held_ += text;
  const bool may_be_dropped = !content_started_ && (tools_ || options_.thinking);
  if (!may_be_dropped) emit(OutputEvent::Kind::kContent, std::exchange(held_, ""), out);
}

void OutputParser::emit(OutputEvent::Kind kind, std::string text, Events& out) {
  const int32_t index = kind == OutputEvent::Kind::kArguments ? num_calls_ - 1 : -1;
  out.push_back({kind, index, std::move(text), "", ""});
}

void OutputParser::finish(Events& out) {
  std::string tail;
  repair_.finish(tail);
  on_text(tail, out);
  if (state_ == State::kArguments) end_call(out);
  if (state_ == State::kContent && !held_.empty()) emit(OutputEvent::Kind::kContent, std::exchange(held_, ""), out);
  held_.clear();
  header_.clear();
}

ParsedOutput collect(std::span<const OutputEvent> events) {
  ParsedOutput out;
  for (const OutputEvent& event : events) {
    switch (event.kind) {
      case OutputEvent::Kind::kReasoning: out.reasoning = std::move(out.reasoning).value_or("") + event.text; break;
      case OutputEvent::Kind::kContent: out.content = std::move(out.content).value_or("") + event.text; break;
      case OutputEvent::Kind::kToolCall: out.calls.push_back({event.call_id, event.name, ""}); break;
      case OutputEvent::Kind::kArguments:
        CHECK(static_cast<size_t>(event.call_index) < out.calls.size(), event.call_index);
        out.calls[event.call_index].arguments += event.text;
        break;
    }
  }
  for (ParsedOutput::Call& call : out.calls) {
    call.arguments = std::string(trimmed(call.arguments));
    if (call.arguments.empty()) call.arguments = "{}";
  }
  return out;
}

bool prompt_leaves_reasoning_open(const Tokenizer& tokenizer, std::span<const int32_t> prompt) {
  const auto think = tokenizer.special_id("<think>");
  if (!think) return false;
  const auto end_think = tokenizer.special_id("</think>");
  const auto section = tokenizer.special_id("<|tool_calls_section_begin|>");
  const auto assistant = tokenizer.special_id("<|im_assistant|>");
  for (size_t i = prompt.size(); i-- > 0;) {
    if (prompt[i] == think) return true;
    if (prompt[i] == end_think || prompt[i] == section) return false;
    if (prompt[i] == assistant) break;
  }
  return true;
}

}  // namespace perigee

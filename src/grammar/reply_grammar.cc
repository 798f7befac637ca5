#include "grammar/reply_grammar.h"

#include <algorithm>
#include <utility>

namespace perigee {
namespace {

constexpr std::string_view kPrefix = "functions.";
constexpr size_t kIndexDigits = 4;  // of a call's IDX, at most

}  // namespace

ReplyMarkers::ReplyMarkers(const Tokenizer& tokenizer)
    : think(tokenizer.special_id("<think>")),
      end_think(tokenizer.special_id("</think>")),
      section_begin(tokenizer.special_id("<|tool_calls_section_begin|>")),
      section_end(tokenizer.special_id("<|tool_calls_section_end|>")),
      call_begin(tokenizer.special_id("<|tool_call_begin|>")),
      argument_begin(tokenizer.special_id("<|tool_call_argument_begin|>")),
      call_end(tokenizer.special_id("<|tool_call_end|>")) {}

Status ReplyGrammar::check_markers() const {
  if (after_reasoning_ && !markers_.end_think)
    return Error(Code::kBadInput, "this model's vocabulary has no </think>, so no grammar can begin after it");
  if (text_ == nullptr && !markers_.has_calls())
    return Error(Code::kBadInput,
                 "this model's vocabulary has no markers of tool calls (<|tool_calls_section_begin|> …)");
  return {};
}

int32_t ReplyGrammar::call_ids(const Tool& tool) const {
  return static_cast<int32_t>(tool.header.size() + tool.arguments->shortest().size()) + 3;  // digit, markers
}

size_t ReplyGrammar::shortest_tool() const {
  const auto shortest = std::min_element(tools_.begin(), tools_.end(),
                                         [&](const Tool& a, const Tool& b) { return call_ids(a) < call_ids(b); });
  return static_cast<size_t>(shortest - tools_.begin());
}

Result<std::shared_ptr<const Constraint>> ReplyGrammar::of_text(std::shared_ptr<const TokenTable> table,
                                                                std::shared_ptr<const TextGrammar> text,
                                                                bool after_reasoning) {
  std::shared_ptr<ReplyGrammar> made(new ReplyGrammar(std::move(table), after_reasoning));
  made->text_ = std::move(text);
  if (Status status = made->check_markers(); !status.ok()) return status.error();
  made->shortest_ = static_cast<int32_t>(made->text_->shortest().size()) + 1 + (after_reasoning ? 1 : 0);
  return std::shared_ptr<const Constraint>(std::move(made));
}

Result<std::shared_ptr<const Constraint>> ReplyGrammar::of_calls(std::shared_ptr<const TokenTable> table,
                                                                 std::vector<Tool> tools, GrammarSpec::Calls calls,
                                                                 bool after_reasoning) {
  std::shared_ptr<ReplyGrammar> made(new ReplyGrammar(std::move(table), after_reasoning));
  made->tools_ = std::move(tools);
  made->calls_ = calls;
  if (Status status = made->check_markers(); !status.ok()) return status.error();
  if (made->tools_.empty()) return Error(Code::kBadInput, "tools: no tool is declared");
  for (Tool& tool : made->tools_) made->table_->append_fewest_ids(std::string(kPrefix) + tool.name + ":", tool.header);
  for (int32_t number = 0; number < 1000; ++number)
    if (const auto id = made->table_->find(std::to_string(number))) made->indices_.emplace_back(number, *id);
  made->shortest_ = 1;
  if (!made->free_text()) {
    // Section, call, section end, end.
    made->shortest_ = 4 + made->call_ids(made->tools_[made->shortest_tool()]) + (after_reasoning ? 1 : 0);
  }
  return std::shared_ptr<const Constraint>(std::move(made));
}

class ReplyState : public ConstraintState {
 public:
  explicit ReplyState(std::shared_ptr<const ReplyGrammar> grammar) : grammar_(std::move(grammar)) {
    if (grammar_->free_text()) {
      at_.phase = Phase::kFree;
    } else if (grammar_->after_reasoning_) {
      at_.phase = Phase::kReasoning;
    } else {
      enter_body();
    }
  }

  bool accept(int32_t id) override;
  std::string_view fault() const override {
    if (at_.cursor == nullptr || !at_.cursor->was_too_much()) return {};
    return "the reply can be read in too many ways under its schema or grammar: let alternatives of a rule begin "
           "differently";
  }
  void masks(std::span<const int32_t> drafts, int32_t ids_left, int64_t words, uint32_t* out) override;

 private:
  enum class Phase {
    kReasoning,  // anything ordinary, until </think>
    kFree,       // anything, reasoning included, until a section begins or the reply ends
    kText,       // a text of the grammar, then an end
    kSection,    // section_begin comes (required calls)
    kCall,       // call_begin comes
    kName,       // functions.NAME:
    kIndex,      // digits, then argument_begin
    kArguments,  // a text of the tool's grammar, then call_end
    kBetween,    // another call, or section_end
    kClosing,    // section_end comes
    kOver,       // an end comes
    kEnded,
  };
  // Small, so that masks() can go ahead along drafts and come back.
  struct Place {
    Phase phase = Phase::kReasoning;
    std::shared_ptr<TextCursor> cursor;  // kText, kArguments
    std::string name;                    // kName: the bytes so far
    size_t digits = 0;                   // kIndex
    size_t tool = 0;                     // from kIndex on
  };

  bool is_end(int32_t id) const {
    const std::vector<int32_t>& ends = table().ends();
    return std::find(ends.begin(), ends.end(), id) != ends.end();
  }
  const TokenTable& table() const { return *grammar_->table_; }
  const ReplyMarkers& markers() const { return grammar_->markers_; }

  void enter_body() {
    at_.phase = Phase::kSection;
    if (grammar_->text_ == nullptr) return;
    at_.phase = Phase::kText;
    at_.cursor = grammar_->text_->begin();
  }
  bool to(Phase next) {
    at_.phase = next;
    return true;
  }
  std::string header_of(size_t tool) const { return std::string(kPrefix) + grammar_->tools_[tool].name + ":"; }
  bool begin_name();
  bool accept_free(int32_t id);
  bool accept_name(int32_t id);
  bool accept_index(int32_t id);

  // The ids that may follow here, of which a reply may still have ids_left.
  void allow(int32_t ids_left, uint32_t* words);
  void allow_text(int32_t ids_left, uint32_t* words);
  void allow_name(int32_t ids_left, uint32_t* words) const;
  void allow_index(int32_t ids_left, uint32_t* words) const;
  void allow_ends(uint32_t* words) const {
    for (const int32_t id : table().ends()) set_bit(words, id);
  }
  void allow_ordinary(uint32_t* words) const {
    const int32_t count = table().num_ordinary();
    std::fill(words, words + count / 32, ~uint32_t{0});
    if (count % 32 != 0) words[count / 32] |= (1u << (count % 32)) - 1;
  }
  // Ids from call_begin to the end of the reply, by the shortest tool.
  int32_t ids_of_a_call() const { return 3 + grammar_->call_ids(grammar_->tools_[grammar_->shortest_tool()]); }

  std::shared_ptr<const ReplyGrammar> grammar_;
  Place at_;
};

std::unique_ptr<ConstraintState> ReplyGrammar::begin() const {
  return std::make_unique<ReplyState>(shared_from_this());
}

bool ReplyState::accept(int32_t id) {
  switch (at_.phase) {
    case Phase::kReasoning:
      if (id == markers().end_think) {
        enter_body();
        return true;
      }
      return table().is_ordinary(id) || id == markers().think;
    case Phase::kFree: return accept_free(id);
    case Phase::kText:
      if (is_end(id) && at_.cursor->at_end()) return to(Phase::kEnded);
      return at_.cursor->accept(id);
    case Phase::kSection: return id == markers().section_begin && to(Phase::kCall);
    case Phase::kCall: return id == markers().call_begin && begin_name();
    case Phase::kName: return accept_name(id);
    case Phase::kIndex: return accept_index(id);
    case Phase::kArguments:
      if (id == markers().call_end && at_.cursor->at_end())
        return to(grammar_->one_call() ? Phase::kClosing : Phase::kBetween);
      return at_.cursor->accept(id);
    case Phase::kBetween:
      if (id == markers().call_begin) return begin_name();
      [[fallthrough]];
    case Phase::kClosing: return id == markers().section_end && to(Phase::kOver);
    case Phase::kOver: return is_end(id) && to(Phase::kEnded);
    case Phase::kEnded: return false;
  }
  return false;
}

// Markers that only have a meaning inside a section may not stand outside one.
bool ReplyState::accept_free(int32_t id) {
  if (is_end(id)) return to(Phase::kEnded);
  if (id == markers().section_begin) return to(Phase::kCall);
  return table().is_ordinary(id) || id == markers().think || id == markers().end_think;
}

bool ReplyState::begin_name() {
  at_.name.clear();
  return to(Phase::kName);
}

bool ReplyState::accept_name(int32_t id) {
  if (!table().is_ordinary(id)) return false;
  const std::string name = at_.name + std::string(table().tokenizer().bytes(id));
  bool goes_on = false;
  for (size_t i = 0; i < grammar_->tools_.size(); ++i) {
    const std::string whole = header_of(i);
    goes_on |= whole.starts_with(name);
    if (whole != name) continue;
    at_.tool = i;
    at_.digits = 0;
    at_.phase = Phase::kIndex;
  }
  if (goes_on) at_.name = name;
  return goes_on;
}

bool ReplyState::accept_index(int32_t id) {
  if (id == markers().argument_begin && at_.digits > 0) {
    at_.cursor = grammar_->tools_[at_.tool].arguments->begin();
    return to(Phase::kArguments);
  }
  if (!table().is_ordinary(id)) return false;
  const std::string_view bytes = table().tokenizer().bytes(id);
  if (bytes.find_first_not_of("0123456789") != std::string_view::npos) return false;
  if (at_.digits + bytes.size() > kIndexDigits) return false;
  at_.digits += bytes.size();
  return true;
}

void ReplyState::masks(std::span<const int32_t> drafts, int32_t ids_left, int64_t words, uint32_t* out) {
  CHECK(words >= table().words(), "masks of ", words, " words for a vocabulary of ", table().words());
  const Place here = at_;
  std::optional<TextCursor::Mark> mark;
  size_t made = 0;  // masks that somebody may read
  while (made <= drafts.size()) {
    const int64_t left = int64_t{ids_left} - static_cast<int64_t>(made);
    if (left < 1 || at_.phase == Phase::kEnded) break;
    uint32_t* mask = out + static_cast<int64_t>(made) * words;
    std::fill(mask, mask + words, 0);
    allow(static_cast<int32_t>(left), mask);
    ++made;
    if (made > drafts.size()) break;
    if (!mark && here.cursor != nullptr) mark = here.cursor->mark();
    const int32_t draft = drafts[made - 1];
    if (draft < 0 || draft >= words * 32 || !has_bit(mask, draft) || !accept(draft)) break;
  }
  std::fill(out + static_cast<int64_t>(made) * words, out + static_cast<int64_t>(drafts.size() + 1) * words,
            ~uint32_t{0});
  at_ = here;
  if (mark) at_.cursor->rewind(*mark);
}

void ReplyState::allow(int32_t ids_left, uint32_t* words) {
  const auto only = [&](const std::optional<int32_t>& id) { set_bit(words, *id); };
  constexpr int32_t kSpare = Constraint::kSpareIds;
  switch (at_.phase) {
    case Phase::kReasoning:
      only(markers().end_think);
      if (ids_left <= grammar_->shortest_ + kSpare) return;
      allow_ordinary(words);
      if (markers().think) only(markers().think);
      return;
    case Phase::kFree:
      allow_ordinary(words);
      allow_ends(words);
      if (markers().think) only(markers().think);
      if (markers().end_think) only(markers().end_think);
      if (ids_left > 1 + ids_of_a_call() + kSpare) only(markers().section_begin);
      return;
    case Phase::kText: return allow_text(ids_left, words);
    case Phase::kSection: return only(markers().section_begin);
    case Phase::kCall: return only(markers().call_begin);
    case Phase::kName: return allow_name(ids_left, words);
    case Phase::kIndex: return allow_index(ids_left, words);
    case Phase::kArguments: return allow_text(ids_left, words);
    case Phase::kBetween:
      only(markers().section_end);
      if (ids_left > ids_of_a_call() + kSpare) only(markers().call_begin);
      return;
    case Phase::kClosing: return only(markers().section_end);
    case Phase::kOver: return allow_ends(words);
    case Phase::kEnded: return;
  }
}

// After the text comes an end; after arguments call_end, section_end and an end.
void ReplyState::allow_text(int32_t ids_left, uint32_t* words) {
  const bool arguments = at_.phase == Phase::kArguments;
  at_.cursor->allow(ids_left - (arguments ? 3 : 1), Constraint::kSpareIds, words);
  if (!at_.cursor->at_end()) return;
  if (arguments) return set_bit(words, *markers().call_end);
  allow_ends(words);
}

// The tokens that go on with the name of a tool whose call fits; a token does not go past the colon.
void ReplyState::allow_name(int32_t ids_left, uint32_t* words) const {
  const ReplyGrammar::Tool* best = nullptr;
  int64_t fewest = 0;
  std::string_view rest_of_best;
  std::vector<std::string> headers;
  for (size_t i = 0; i < grammar_->tools_.size(); ++i) headers.push_back(header_of(i));
  for (size_t i = 0; i < headers.size(); ++i) {
    if (!headers[i].starts_with(at_.name)) continue;
    const ReplyGrammar::Tool& tool = grammar_->tools_[i];
    const std::string_view rest = std::string_view(headers[i]).substr(at_.name.size());
    // By single bytes, a digit and the markers around the arguments, to the end.
    const int64_t ids = static_cast<int64_t>(rest.size() + tool.arguments->shortest().size()) + 6;
    if (best == nullptr || ids < fewest) {
      best = &tool;
      fewest = ids;
      rest_of_best = rest;
    }
    if (ids + Constraint::kSpareIds >= ids_left) continue;
    for (size_t length = 1; length <= rest.size(); ++length)
      if (const auto id = table().find(rest.substr(0, length))) set_bit(words, *id);
  }
  CHECK(best != nullptr, "a name of no tool");
  if (fewest + Constraint::kSpareIds < ids_left) return;
  // Which call is shortest in ids was settled when the call began: its header, id by id.
  const ReplyGrammar::Tool& shortest = grammar_->tools_[grammar_->shortest_tool()];
  std::string done;
  for (const int32_t id : shortest.header) {
    if (done == at_.name) return set_bit(words, id);
    done += table().tokenizer().bytes(id);
  }
  std::vector<int32_t> way;
  table().append_fewest_ids(rest_of_best, way);
  set_bit(words, way.front());
}

void ReplyState::allow_index(int32_t ids_left, uint32_t* words) const {
  const int64_t after = static_cast<int64_t>(grammar_->tools_[at_.tool].arguments->shortest().size()) + 4;
  if (at_.digits > 0) set_bit(words, *markers().argument_begin);
  if (at_.digits > 0 && ids_left <= after + Constraint::kSpareIds) return;
  for (const auto& [number, id] : grammar_->indices_) {
    const size_t digits = number < 10 ? 1 : number < 100 ? 2 : 3;
    if (at_.digits + digits > kIndexDigits) break;
    if (number >= 10 && ids_left <= after + 1 + Constraint::kSpareIds) break;
    set_bit(words, id);
  }
}

}  // namespace perigee

#include "grammar/closing.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace perigee {
namespace {

using xgrammar::FSMEdge;
using xgrammar::ParserState;

// A byte of the range that reads well in a forced reply.
char pick(const FSMEdge& edge) {
  for (const char wanted : {'a', '0', '"', ' ', 'A'})
    if (edge.min <= wanted && wanted <= edge.max) return wanted;
  return static_cast<char>(edge.min);
}

// A step of no bytes from a place to another, by which a rest grows.
struct Move {
  int32_t from, to, growth;
};

int32_t saturated(int64_t value, int32_t far);

// The moves, those of a place after all moves of the places that it leads to, as far as there is no cycle.
std::vector<Move> ends_first(std::vector<Move> moves, size_t places) {
  std::vector<size_t> begin(places + 1);
  for (const Move& move : moves) ++begin[static_cast<size_t>(move.from) + 1];
  for (size_t i = 0; i < places; ++i) begin[i + 1] += begin[i];
  std::stable_sort(moves.begin(), moves.end(), [](const Move& a, const Move& b) { return a.from < b.from; });
  std::vector<Move> out;
  out.reserve(moves.size());
  std::vector<bool> seen(places);
  std::vector<size_t> next = begin, open;
  for (size_t root = 0; root < places; ++root) {
    if (seen[root]) continue;
    seen[root] = true;
    for (open.push_back(root); !open.empty();) {
      const size_t at = open.back();
      if (next[at] < begin[at + 1]) {
        const auto to = static_cast<size_t>(moves[next[at]++].to);
        if (!seen[to]) open.push_back(to);
        seen[to] = true;
        continue;
      }
      for (size_t i = begin[at]; i < begin[at + 1]; ++i) out.push_back(moves[i]);
      open.pop_back();
    }
  }
  return out;
}

enum class Longest { kFound, kEndless, kTooLong };

// Whether some places lead back to themselves by the moves that raised them last: then their sums have no bound.
bool has_cycle(const std::vector<int32_t>& raised_by) {
  std::vector<int32_t> seen_by(raised_by.size(), -1);
  for (int32_t first = 0; first < std::ssize(raised_by); ++first) {
    int32_t at = first;
    for (; at >= 0 && seen_by[at] < 0; at = raised_by[at]) seen_by[at] = first;
    if (at >= 0 && seen_by[at] == first) return true;
  }
  return false;
}

// most[place], the largest sum of growths from there on, is raised until no move raises it. Not found: a cycle grows,
// or sums reach `far` or take too long without one.
Longest longest(std::vector<int32_t>& most, const std::vector<Move>& within, std::vector<Move> others, int32_t far) {
  constexpr size_t kMostWork = 100'000'000;  // some tenths of a second
  others.insert(others.end(), within.begin(), within.end());
  const std::vector<Move> moves = ends_first(std::move(others), most.size());
  std::vector<int32_t> raised_by(most.size(), -1);  // the place that a move led to
  bool is_far = false;
  for (size_t round = 0; !is_far && round <= most.size() && round * moves.size() <= kMostWork; ++round) {
    bool changed = false;
    for (const Move& move : moves) {
      const int64_t through = int64_t{move.growth} + most[move.to];
      if (through <= most[move.from]) continue;
      most[move.from] = saturated(through, far);
      raised_by[move.from] = move.to;
      is_far = is_far || most[move.from] >= far;
      changed = true;
    }
    if (!changed) return Longest::kFound;
  }
  return has_cycle(raised_by) ? Longest::kEndless : Longest::kTooLong;
}

int32_t saturated(int64_t value, int32_t far) {
  return static_cast<int32_t>(std::min<int64_t>(value, far));
}

}  // namespace

Distances::Distances(xgrammar::Grammar grammar) : grammar_(std::move(grammar)) {
  edges_.reserve(static_cast<size_t>(fsm().NumStates()));
  for (int32_t place = 0; place < fsm().NumStates(); ++place) {
    const auto edges = fsm().GetEdges(place);
    edges_.emplace_back(edges.begin(), edges.end());
  }
}

// Bytes of one edge; kFar for edges of token ids, which text does not have.
int64_t Distances::cost(const FSMEdge& edge) const {
  if (edge.IsCharRange()) return 1;
  if (edge.IsEpsilon()) return 0;
  if (edge.IsRuleRef()) return to_end_[start_of(edge.GetRefRuleId())];
  if (edge.IsRepeatRef()) {
    const auto repeat = fsm().GetRepeatEdgeInfo(edge.GetAuxIndex());
    return repeat.Lower() == 0 ? 0 : int64_t{repeat.Lower()} * to_end_[start_of(repeat.RuleId())];
  }
  return kFar;
}

// Knuth's generalisation of Dijkstra's algorithm: the places nearest to an end first. An edge counts once what it leads
// to, and the rule it goes through, are known.
void Distances::relax() {
  struct Use {
    int32_t place, edge;
  };
  const int32_t places = fsm().NumStates();
  to_end_.assign(places, kFar);
  best_.assign(places, -1);
  std::vector<std::vector<Use>> uses(places);  // by place: the edges whose cost depends on it
  for (int32_t place = 0; place < places; ++place) {
    const auto edges = fsm().GetEdges(place);
    for (int32_t i = 0; i < edges.size(); ++i) {
      uses[edges[i].target].push_back({place, i});
      if (edges[i].IsRuleRef()) uses[start_of(edges[i].GetRefRuleId())].push_back({place, i});
      if (edges[i].IsRepeatRef())
        uses[start_of(fsm().GetRepeatEdgeInfo(edges[i].GetAuxIndex()).RuleId())].push_back({place, i});
    }
  }
  using Known = std::pair<int32_t, int32_t>;  // bytes to the end, place
  std::priority_queue<Known, std::vector<Known>, std::greater<>> nearest;
  for (int32_t rule = 0; rule < grammar_->NumRules(); ++rule) {
    for (const int32_t end : grammar_->per_rule_fsms[rule]->GetFsm().GetEnds()) {
      to_end_[end] = 0;
      nearest.emplace(0, end);
    }
  }
  while (!nearest.empty()) {
    const auto [bytes, known] = nearest.top();
    nearest.pop();
    if (bytes > to_end_[known]) continue;  // a shorter way was found since
    for (const Use& use : uses[known]) {
      const FSMEdge& edge = fsm().GetEdges(use.place)[use.edge];
      const int64_t rest = cost(edge) + to_end_[edge.target];
      if (rest >= to_end_[use.place]) continue;
      to_end_[use.place] = static_cast<int32_t>(rest);
      best_[use.place] = use.edge;
      nearest.emplace(to_end_[use.place], use.place);
    }
  }
}

// The largest sum of growths on a way of no bytes: first up, from a place to the end of its rule and into the rules
// that wait for it, then down into rules that begin there. Down is not followed by up: a rule that is entered and left
// without a byte is an edge of no bytes. Both are longest paths over graphs whose cycles must not grow.
Status Distances::find_growth() {
  const int32_t places = num_places();
  std::vector<Move> within, up, down;
  std::vector<std::vector<int32_t>> returns(grammar_->NumRules());
  for (int32_t place = 0; place < places; ++place) {
    if (to_end_[place] >= kFar) continue;
    for (const FSMEdge& edge : fsm().GetEdges(place)) {
      const int64_t after = to_end_[edge.target];
      if (after >= kFar) continue;
      const auto move_to = [&](int32_t to, int64_t rest) {
        return Move{place, to, saturated(rest - to_end_[place], kFar)};
      };
      if (edge.IsEpsilon()) within.push_back(move_to(edge.target, after));
      if (edge.IsRuleRef()) {
        const int32_t start = start_of(edge.GetRefRuleId());
        if (to_end_[start] >= kFar) continue;
        if (to_end_[start] == 0) within.push_back(move_to(edge.target, after));
        down.push_back(move_to(start, to_end_[start] + after));
        returns[edge.GetRefRuleId()].push_back(edge.target);
      }
      if (edge.IsRepeatRef()) {
        const auto repeat = fsm().GetRepeatEdgeInfo(edge.GetAuxIndex());
        const int32_t start = start_of(repeat.RuleId());
        if (to_end_[start] >= kFar) continue;
        within.push_back({place, edge.target, 0});
        down.push_back({place, start, repeat.Upper() > repeat.Lower() ? to_end_[start] : 0});
        returns[repeat.RuleId()].push_back(edge.target);
        returns[repeat.RuleId()].push_back(place);
      }
    }
  }
  for (int32_t rule = 0; rule < grammar_->NumRules(); ++rule) {
    for (const int32_t end : grammar_->per_rule_fsms[rule]->GetFsm().GetEnds())
      for (const int32_t to : returns[rule]) up.push_back({end, to, 0});
  }
  std::vector<int32_t> most(places, 0);
  Longest found = longest(most, within, std::move(down), kFar);
  if (found == Longest::kFound) found = longest(most, within, std::move(up), kFar);
  if (found == Longest::kEndless)
    return Error(Code::kBadInput, "the grammar is left-recursive, or repeats a part that may be empty");
  if (found == Longest::kTooLong)
    return Error(
        Code::kBadInput,
        "its rules begin with one another too often, and much follows each: give them beginnings of their own");
  growth_.fill(kNever);
  for (int32_t place = 0; place < places; ++place) {
    if (to_end_[place] >= kFar) continue;
    for (const FSMEdge& edge : fsm().GetEdges(place)) {
      if (!edge.IsCharRange() || to_end_[edge.target] >= kFar) continue;
      const int32_t grown = to_end_[edge.target] - to_end_[place] + most[edge.target];
      for (int32_t byte = edge.min; byte <= std::min(edge.max, 255); ++byte)
        growth_[byte] = std::max(growth_[byte], grown);
    }
  }
  return {};
}

// What is entered must have a way out: a text that begins a part without an end could not be closed.
bool Distances::leads_nowhere() const {
  std::vector<bool> seen(num_places(), false);
  std::vector<int32_t> next;
  bool found = false;
  const auto enter = [&](int32_t place) {
    found = found || to_end_[place] >= kFar;
    if (!seen[place]) next.push_back(place);
    seen[place] = true;
  };
  enter(start_of(grammar_->GetRootRuleId()));
  while (!next.empty() && !found) {
    const int32_t place = next.back();
    next.pop_back();
    for (const FSMEdge& edge : fsm().GetEdges(place)) {
      if (edge.IsRuleRef()) enter(start_of(edge.GetRefRuleId()));
      if (edge.IsRepeatRef()) enter(start_of(fsm().GetRepeatEdgeInfo(edge.GetAuxIndex()).RuleId()));
      if (edge.IsCharRange() || edge.IsEpsilon() || edge.IsRuleRef() || edge.IsRepeatRef()) enter(edge.target);
    }
  }
  return found;
}

Result<Distances> Distances::make(const xgrammar::Grammar& grammar, int32_t shortest_bytes) {
  Distances made(grammar);
  made.relax();
  const int32_t shortest = made.to_end_[made.start_of(grammar->GetRootRuleId())];
  if (shortest >= kFar) return Error(Code::kBadInput, "no text can satisfy it");
  if (shortest > shortest_bytes) {
    return Error(Code::kBadInput, "its shortest text has " + std::to_string(shortest) + " bytes, at most " +
                                      std::to_string(shortest_bytes) + " are allowed");
  }
  if (made.leads_nowhere())
    return Error(Code::kBadInput,
                 "a part of it that is not required leads back to itself without an end: leave it out");
  Status found = made.find_growth();
  if (!found.ok()) return found.error();
  return made;
}

int32_t Distances::to_rule_end(const ParserState& state) const {
  if (state.repeat_count == 0) return to_end_[state.element_id];
  const FSMEdge& edge = fsm().GetEdges(state.element_id)[0];
  const auto repeat = fsm().GetRepeatEdgeInfo(edge.GetAuxIndex());
  const int64_t left = std::max(0, repeat.Lower() - state.repeat_count);
  return saturated(left * to_end_[start_of(repeat.RuleId())] + to_end_[edge.target], kFar);
}

int32_t Distances::after_child(const ParserState& waiting, int32_t rule) const {
  const auto edges = fsm().GetEdges(waiting.element_id);
  if (edges.size() == 1 && edges[0].IsRepeatRef()) {
    // Waiting states of other edges already stand behind them, maybe at a repetition, which then waits for itself.
    const auto repeat = fsm().GetRepeatEdgeInfo(edges[0].GetAuxIndex());
    if (repeat.RuleId() == rule) {
      const int64_t left = std::max(0, repeat.Lower() - waiting.repeat_count - 1);
      return saturated(left * to_end_[start_of(rule)] + to_end_[edges[0].target], kFar);
    }
  }
  return to_rule_end(waiting);
}

int32_t Distances::count_that_matters(const ParserState& state, int32_t bytes) const {
  const auto edges = fsm().GetEdges(state.element_id);
  if (edges.size() != 1 || !edges[0].IsRepeatRef()) return state.repeat_count;
  const auto repeat = fsm().GetRepeatEdgeInfo(edges[0].GetAuxIndex());
  const bool may_leave = state.repeat_count >= repeat.Lower();
  const int64_t left = int64_t{may_leave ? repeat.Upper() : repeat.Lower()} - state.repeat_count;
  if (left <= bytes) return state.repeat_count;
  return may_leave ? -1 : -2;
}

void Distances::append(int32_t place, std::string& out) const {
  while (to_end_[place] > 0 || best_[place] >= 0) {
    const FSMEdge& edge = fsm().GetEdges(place)[best_[place]];
    if (edge.IsCharRange()) out += pick(edge);
    if (edge.IsRuleRef()) append(start_of(edge.GetRefRuleId()), out);
    if (edge.IsRepeatRef()) {
      const auto repeat = fsm().GetRepeatEdgeInfo(edge.GetAuxIndex());
      for (int32_t i = 0; i < repeat.Lower() && to_end_[start_of(repeat.RuleId())] > 0; ++i)
        append(start_of(repeat.RuleId()), out);
    }
    place = edge.target;
  }
}

void Distances::append_to_rule_end(const ParserState& state, std::string& out) const {
  if (state.repeat_count == 0) return append(state.element_id, out);
  const FSMEdge& edge = fsm().GetEdges(state.element_id)[0];
  const auto repeat = fsm().GetRepeatEdgeInfo(edge.GetAuxIndex());
  for (int32_t i = state.repeat_count; i < repeat.Lower(); ++i) append(start_of(repeat.RuleId()), out);
  append(edge.target, out);
}

void Distances::append_after_child(const ParserState& waiting, int32_t rule, std::string& out) const {
  const auto edges = fsm().GetEdges(waiting.element_id);
  if (edges.size() == 1 && edges[0].IsRepeatRef()) {
    const auto repeat = fsm().GetRepeatEdgeInfo(edges[0].GetAuxIndex());
    if (repeat.RuleId() == rule) {
      for (int32_t i = waiting.repeat_count + 1; i < repeat.Lower(); ++i) append(start_of(rule), out);
      return append(edges[0].target, out);
    }
  }
  append_to_rule_end(waiting, out);
}

}  // namespace perigee

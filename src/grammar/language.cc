#include "grammar/language.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/utf8.h"

namespace perigee {
namespace {

using Edge = Language::Edge;
using State = Language::State;

// The states of pairs of states, -1 standing for one that no text leaves.
template <typename Accepts>
Result<std::vector<State>> product(const std::vector<State>& a, const std::vector<State>& b, bool one_suffices,
                                   const Accepts& accepts) {
  std::map<std::pair<int32_t, int32_t>, int32_t> numbers;
  std::vector<std::pair<int32_t, int32_t>> pairs;
  const auto number = [&](int32_t x, int32_t y) {
    if ((x < 0 || y < 0) && !(one_suffices && (x >= 0 || y >= 0))) return -1;
    const auto [at, is_new] = numbers.emplace(std::pair(x, y), static_cast<int32_t>(pairs.size()));
    if (is_new) pairs.emplace_back(x, y);
    return at->second;
  };
  static const State kNowhere;
  std::vector<State> out;
  number(a.empty() ? -1 : 0, b.empty() ? -1 : 0);
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs.size() > 4 * Language::kMostStates) return Language::too_large();
    const auto [x, y] = pairs[i];
    const State &left = x < 0 ? kNowhere : a[x], &right = y < 0 ? kNowhere : b[y];
    State state{accepts(left.accepts, right.accepts), {}};
    std::vector<uint32_t> cuts;
    for (const State* side : {&left, &right})
      for (const Edge& edge : side->edges) {
        cuts.push_back(edge.low);
        cuts.push_back(edge.high + 1);
      }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    size_t at_left = 0, at_right = 0;
    const auto target = [](const State& of, size_t& at, uint32_t c) {
      while (at < of.edges.size() && of.edges[at].high < c) ++at;
      return at < of.edges.size() && of.edges[at].low <= c ? of.edges[at].to : -1;
    };
    for (size_t cut = 0; cut + 1 < cuts.size(); ++cut) {
      const int32_t to = number(target(left, at_left, cuts[cut]), target(right, at_right, cuts[cut]));
      if (to >= 0) Language::add_edge(state.edges, {cuts[cut], cuts[cut + 1] - 1, to});
    }
    out.push_back(std::move(state));
  }
  return out;
}

}  // namespace

Error Language::too_large() {
  return Error(Code::kBadInput, "its automaton is too large: use fewer or smaller repetitions, or none of the lengths");
}

void Language::add_edge(std::vector<Edge>& edges, const Edge& edge) {
  if (!edges.empty() && edges.back().to == edge.to && edges.back().high + 1 == edge.low) {
    edges.back().high = edge.high;
  } else {
    edges.push_back(edge);
  }
}

Language Language::of_states(std::vector<State> states) {
  const size_t count = states.size();
  // From which a text can be finished.
  std::vector<std::vector<int32_t>> before(count);
  std::vector<bool> lives(count);
  std::vector<int32_t> todo;
  for (size_t i = 0; i < count; ++i) {
    for (const Edge& edge : states[i].edges) before[edge.to].push_back(static_cast<int32_t>(i));
    if (!states[i].accepts) continue;
    lives[i] = true;
    todo.push_back(static_cast<int32_t>(i));
  }
  while (!todo.empty()) {
    const int32_t at = todo.back();
    todo.pop_back();
    for (const int32_t from : before[at]) {
      if (!lives[from]) todo.push_back(from);
      lives[from] = true;
    }
  }
  Language out;
  if (count == 0 || !lives[0]) return out;
  for (State& state : states) std::erase_if(state.edges, [&](const Edge& edge) { return !lives[edge.to]; });
  // Moore: classes are split until the states of each have edges into the same classes. What takes too many rounds,
  // such as long chains, stays as it is.
  constexpr int kMostRounds = 64;
  std::vector<int32_t> classes(count, -1);
  size_t num_classes = 0;
  for (int round = 0;; ++round) {
    std::map<std::pair<int32_t, std::vector<std::pair<std::pair<uint32_t, uint32_t>, int32_t>>>, int32_t> seen;
    std::vector<int32_t> next(count, -1);
    for (size_t i = 0; i < count; ++i) {
      if (!lives[i]) continue;
      std::vector<Edge> edges;
      for (const Edge& edge : states[i].edges) add_edge(edges, {edge.low, edge.high, classes[edge.to]});
      std::vector<std::pair<std::pair<uint32_t, uint32_t>, int32_t>> key;
      for (const Edge& edge : edges) key.push_back({{edge.low, edge.high}, edge.to});
      const int32_t own = round == kMostRounds ? static_cast<int32_t>(i) : 2 * classes[i] + (states[i].accepts ? 1 : 0);
      next[i] = seen.emplace(std::pair(own, std::move(key)), static_cast<int32_t>(seen.size())).first->second;
    }
    classes = std::move(next);
    const bool settled = seen.size() == num_classes;
    num_classes = seen.size();
    if (settled || round == kMostRounds) break;
  }
  // State 0 was numbered first, so its class is 0.
  out.states_.resize(num_classes);
  std::vector<bool> made(num_classes);
  for (size_t i = 0; i < count; ++i) {
    if (!lives[i] || made[classes[i]]) continue;
    made[classes[i]] = true;
    State& state = out.states_[classes[i]];
    state.accepts = states[i].accepts;
    for (const Edge& edge : states[i].edges) add_edge(state.edges, {edge.low, edge.high, classes[edge.to]});
  }
  return out;
}

Language Language::of_texts(const std::vector<std::string>& texts) {
  std::vector<std::map<uint32_t, int32_t>> next(1);
  std::vector<bool> ends(1);
  for (const std::string& text : texts) {
    int32_t at = 0;
    for (size_t i = 0; i < text.size();) {
      const Utf8Char c = utf8_at(text, i);
      i += c.length;
      const auto [to, is_new] = next[at].emplace(c.code_point, static_cast<int32_t>(next.size()));
      at = to->second;
      if (!is_new) continue;
      next.emplace_back();
      ends.push_back(false);
    }
    ends[at] = true;
  }
  std::vector<State> states;
  for (size_t i = 0; i < next.size(); ++i) {
    states.push_back({ends[i], {}});
    for (const auto& [c, to] : next[i]) states.back().edges.push_back({c, c, to});
  }
  return of_states(std::move(states));
}

Language Language::of_lengths(int64_t least, int64_t most) {
  Language out;
  if (most >= 0 && least > most) return out;
  for (int64_t length = 0; length < std::max(least, most); ++length)
    out.states_.push_back({length >= least, {{0, kLastCodePoint, static_cast<int32_t>(length) + 1}}});
  const int32_t last = static_cast<int32_t>(out.states_.size());
  out.states_.push_back({true, {}});
  if (most < 0) out.states_.back().edges.push_back({0, kLastCodePoint, last});
  return out;
}

Language Language::of_first(const CodePoints& set, bool or_empty) {
  std::vector<State> states = {{or_empty, {}}, {true, {{0, kLastCodePoint, 1}}}};
  for (const auto& [low, high] : set) states[0].edges.push_back({low, high, 1});
  return of_states(std::move(states));
}

Result<Language> Language::intersected(const Language& other) const {
  if (is_empty() || other.is_empty()) return Language();
  ASSIGN_OR_RETURN(std::vector<State> states,
                   product(states_, other.states_, false, [](bool a, bool b) { return a && b; }));
  return of_states(std::move(states));
}

Result<Language> Language::united(const Language& other) const {
  if (is_empty()) return other;
  if (other.is_empty()) return *this;
  ASSIGN_OR_RETURN(std::vector<State> states,
                   product(states_, other.states_, true, [](bool a, bool b) { return a || b; }));
  return of_states(std::move(states));
}

Language Language::complement() const {
  if (is_empty()) return all();
  std::vector<State> states = states_;
  const int32_t rest = static_cast<int32_t>(states.size());
  states.push_back({false, {}});
  for (State& state : states) {
    state.accepts = !state.accepts;
    std::vector<Edge> edges;
    uint32_t next = 0;
    for (const Edge& edge : state.edges) {
      if (edge.low > next) add_edge(edges, {next, edge.low - 1, rest});
      add_edge(edges, edge);
      next = edge.high + 1;
    }
    if (next <= kLastCodePoint) add_edge(edges, {next, kLastCodePoint, rest});
    state.edges = std::move(edges);
  }
  return of_states(std::move(states));
}

bool Language::matches(std::string_view text) const {
  if (is_empty()) return false;
  int32_t at = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_at(text, i);
    i += c.length;
    int32_t next = -1;
    for (const Edge& edge : states_[at].edges)
      if (edge.low <= c.code_point && c.code_point <= edge.high) next = edge.to;
    if (next < 0) return false;
    at = next;
  }
  return states_[at].accepts;
}

}  // namespace perigee

#include "grammar/language.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/utf8.h"

namespace perigee {
namespace {

using Node = PatternNode;
using Edge = Language::Edge;
using State = Language::State;

constexpr int64_t kMostNodes = 30'000;       // of an expression whose repetitions are written out
constexpr int64_t kMostPlaces = 20'000'000;  // that all sets of the subset construction may hold, about a second

Error too_large() {
  return Error(Code::kBadInput, "its automaton is too large: use fewer or smaller repetitions, or none of the lengths");
}

// Nondeterministic: edges of sets, and of nothing.
struct Places {
  struct Place {
    std::vector<std::pair<CodePoints, int32_t>> edges;
    std::vector<int32_t> empty, at_begin, at_end;  // passed without a character, the last two only there
  };
  std::vector<Place> all;

  int32_t add() {
    all.emplace_back();
    return static_cast<int32_t>(all.size()) - 1;
  }
  bool is_full() const { return static_cast<int64_t>(all.size()) > kMostNodes; }

  // From `from` to the place that is returned.
  int32_t append(const Node& node, int32_t from) {
    if (is_full()) return from;
    switch (node.kind) {
      case Node::Kind::kSequence:
        if (node.parts.empty()) break;  // a place of its own: what is repeated is counted by its places
        for (const Node& part : node.parts) from = append(part, from);
        return from;
      case Node::Kind::kChoice: {
        const int32_t to = add();
        for (const Node& part : node.parts) {
          const int32_t end = append(part, from);
          all[end].empty.push_back(to);
        }
        return to;
      }
      case Node::Kind::kRepeat: {
        for (int32_t i = 0; i < node.least && !is_full(); ++i) from = append(node.parts[0], from);
        if (node.most == Node::kNoEnd) {
          const int32_t begin = add();
          all[from].empty.push_back(begin);
          const int32_t end = append(node.parts[0], begin), to = add();
          all[end].empty.push_back(begin);
          all[begin].empty.push_back(to);
          return to;
        }
        const int32_t to = add();
        for (int32_t i = node.least; i < node.most && !is_full(); ++i) {
          all[from].empty.push_back(to);
          from = append(node.parts[0], from);
        }
        all[from].empty.push_back(to);
        return to;
      }
      default: break;
    }
    const int32_t to = add();
    if (node.kind == Node::Kind::kSet) all[from].edges.emplace_back(node.set, to);
    if (node.kind == Node::Kind::kSequence) all[from].empty.push_back(to);
    if (node.kind == Node::Kind::kBegin) all[from].at_begin.push_back(to);
    if (node.kind == Node::Kind::kEnd) all[from].at_end.push_back(to);
    return to;
  }

  std::vector<int32_t> closed(std::vector<int32_t> set, bool begin, bool end) const {
    std::vector<bool> seen(all.size());
    for (const int32_t place : set) seen[place] = true;
    const auto visit = [&](const std::vector<int32_t>& next) {
      for (const int32_t place : next) {
        if (!seen[place]) set.push_back(place);
        seen[place] = true;
      }
    };
    for (size_t i = 0; i < set.size(); ++i) {
      const Place& place = all[set[i]];
      visit(place.empty);
      if (begin) visit(place.at_begin);
      if (end) visit(place.at_end);
    }
    std::sort(set.begin(), set.end());
    return set;
  }
};

void add_edge(std::vector<Edge>& edges, const Edge& edge) {
  if (!edges.empty() && edges.back().to == edge.to && edges.back().high + 1 == edge.low) {
    edges.back().high = edge.high;
  } else {
    edges.push_back(edge);
  }
}

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
    if (pairs.size() > 4 * Language::kMostStates) return too_large();
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
      if (to >= 0) add_edge(state.edges, {cuts[cut], cuts[cut + 1] - 1, to});
    }
    out.push_back(std::move(state));
  }
  return out;
}

bool is_ahead(const Node& node) {
  return node.kind == Node::Kind::kAhead || node.kind == Node::Kind::kNotAhead;
}

Result<Node> parsed(std::string_view pattern, Reading reading) {
  if (pattern.size() > 4096) return Error(Code::kBadInput, "a pattern has at most 4096 bytes");
  return parse_pattern(pattern, reading);
}

}  // namespace

class Language::Builder {
 public:
  // A pattern with look-ahead: each of its alternatives is what it and the look-aheads that it begins with match.
  static Result<Language> of(const Node& node) {
    if (!has_ahead(node)) return searched(node, false);
    if (node.kind == Node::Kind::kChoice) {
      Language all;
      for (const Node& part : node.parts) {
        ASSIGN_OR_RETURN(const Language one, of(part));
        ASSIGN_OR_RETURN(all, all.united(one));
      }
      return all;
    }
    ASSIGN_OR_RETURN(const Alternative alternative, alternative_of(node));
    ASSIGN_OR_RETURN(Language out, searched(alternative.rest, true));
    for (const Node& ahead : alternative.aheads) {
      ASSIGN_OR_RETURN(const Language one, searched(ahead.parts[0], true));
      ASSIGN_OR_RETURN(out, out.intersected(ahead.kind == Node::Kind::kAhead ? one : one.complement()));
    }
    return out;
  }

  // Whether a text is one of these.
  static Result<bool> matches(const Node& node, std::string_view text) {
    if (!has_ahead(node)) return found(node, false, text);
    if (node.kind == Node::Kind::kChoice) {
      bool any = false;
      for (const Node& part : node.parts) {
        ASSIGN_OR_RETURN(const bool one, matches(part, text));
        any |= one;
      }
      return any;
    }
    ASSIGN_OR_RETURN(const Alternative alternative, alternative_of(node));
    ASSIGN_OR_RETURN(bool all, found(alternative.rest, true, text));
    for (const Node& ahead : alternative.aheads) {
      ASSIGN_OR_RETURN(const bool one, found(ahead.parts[0], true, text));
      all &= one == (ahead.kind == Node::Kind::kAhead);
    }
    return all;
  }

 private:
  struct Alternative {
    std::vector<Node> aheads;  // kAhead and kNotAhead
    Node rest;
  };
  static Result<Alternative> alternative_of(const Node& node) {
    Alternative out{{}, node.kind == Node::Kind::kSequence ? node : Node{Node::Kind::kSequence, {}, {node}}};
    bool begins = false;
    const auto first = out.rest.parts.begin();
    auto at = first;
    for (; at != out.rest.parts.end() && (at->kind == Node::Kind::kBegin || is_ahead(*at)); ++at) {
      begins |= at->kind == Node::Kind::kBegin;
      if (is_ahead(*at)) out.aheads.push_back(*at);
    }
    out.rest.parts.erase(first, at);
    if (!begins || has_ahead(out.rest))
      return Error(Code::kBadInput, "look-ahead is supported at the beginning of a pattern, after ^, only");
    return out;
  }

  // The places of the texts in which the node matches somewhere, or from the beginning on.
  struct Search {
    Places places;
    int32_t start, last;
  };
  static Result<Search> search_of(const Node& node, bool from_begin) {
    Search out;
    Places& places = out.places;
    out.start = places.add();
    const CodePoints any = {{0, kLastCodePoint}};
    if (!from_begin) places.all[out.start].edges.emplace_back(any, out.start);
    const int32_t end = places.append(node, out.start);
    out.last = places.add();
    places.all[end].empty.push_back(out.last);
    places.all[out.last].edges.emplace_back(any, out.last);
    if (places.is_full()) return too_large();
    return out;
  }
  static Result<Language> searched(const Node& node, bool from_begin) {
    ASSIGN_OR_RETURN(const Search search, search_of(node, from_begin));
    return determined(search.places, search.start, search.last);
  }
  static Result<bool> found(const Node& node, bool from_begin, std::string_view text) {
    ASSIGN_OR_RETURN(const Search search, search_of(node, from_begin));
    const Places& places = search.places;
    std::vector<int32_t> set = places.closed({search.start}, true, text.empty());
    int64_t held = 0;
    for (size_t i = 0; i < text.size() && !set.empty();) {
      const Utf8Char c = utf8_at(text, i);
      i += c.length;
      std::vector<int32_t> next;
      for (const int32_t place : set)
        for (const auto& [ranges, to] : places.all[place].edges)
          if (contains(ranges, c.code_point)) next.push_back(to);
      std::sort(next.begin(), next.end());
      next.erase(std::unique(next.begin(), next.end()), next.end());
      set = places.closed(std::move(next), false, i == text.size());
      held += static_cast<int64_t>(set.size() + places.all.size() / 64);
      if (held > kMostPlaces) return too_large();
    }
    return std::binary_search(set.begin(), set.end(), search.last);
  }
  static Result<Language> determined(const Places& places, int32_t start, int32_t last);
};

Result<Language> Language::Builder::determined(const Places& places, int32_t start, int32_t last) {
  // The first is not looked for again: it alone is where a text begins, and passes ^ and $ at once.
  const std::vector<int32_t> first = places.closed({start}, true, false);
  std::map<std::vector<int32_t>, int32_t> numbers;
  std::vector<const std::vector<int32_t>*> sets = {&first};
  int64_t held = 0;
  const auto number = [&](std::vector<int32_t> set) {
    held += static_cast<int64_t>(set.size());
    const auto [at, is_new] = numbers.emplace(std::move(set), static_cast<int32_t>(sets.size()));
    if (is_new) sets.push_back(&at->first);
    return at->second;
  };
  std::vector<State> out;
  for (size_t i = 0; i < sets.size(); ++i) {
    if (sets.size() > 4 * kMostStates || held > kMostPlaces) return too_large();
    const std::vector<int32_t>& set = *sets[i];
    const std::vector<int32_t> ended = places.closed(set, i == 0, true);
    State state{std::binary_search(ended.begin(), ended.end(), last), {}};
    std::vector<std::pair<uint32_t, int32_t>> cuts;  // where an edge begins (its target) or has ended (~target)
    for (const int32_t place : set)
      for (const auto& [ranges, to] : places.all[place].edges)
        for (const auto& [low, high] : ranges) {
          cuts.emplace_back(low, to);
          cuts.emplace_back(high + 1, ~to);
        }
    std::sort(cuts.begin(), cuts.end());
    std::map<int32_t, int> open;
    for (size_t at = 0; at < cuts.size();) {
      const uint32_t from = cuts[at].first;
      for (; at < cuts.size() && cuts[at].first == from; ++at) {
        const bool begins = cuts[at].second >= 0;
        const int32_t to = begins ? cuts[at].second : ~cuts[at].second;
        if ((open[to] += begins ? 1 : -1) == 0) open.erase(to);
      }
      if (open.empty()) continue;
      std::vector<int32_t> next;
      for (const auto& [to, count] : open) next.push_back(to);
      held += static_cast<int64_t>(next.size());
      add_edge(state.edges, {from, cuts[at].first - 1, number(places.closed(std::move(next), false, false))});
      if (sets.size() > 4 * kMostStates || held > kMostPlaces) return too_large();
    }
    out.push_back(std::move(state));
  }
  return of_states(std::move(out));
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

Result<Language> Language::of_pattern(std::string_view pattern, Reading reading) {
  ASSIGN_OR_RETURN(const Node node, parsed(pattern, reading));
  ASSIGN_OR_RETURN(Language made, Builder::of(node));
  if (made.states_.size() > kMostStates) return too_large();
  return made;
}

Result<bool> Language::pattern_matches(std::string_view pattern, Reading reading, std::string_view text) {
  ASSIGN_OR_RETURN(const Node node, parsed(pattern, reading));
  return Builder::matches(node, text);
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

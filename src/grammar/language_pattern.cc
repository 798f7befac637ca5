// The language of a pattern. Its places (Thompson 1968) become places without assertions: each stands for one of them,
// for what came before it by \b and look-behind, and for what has to come after it by \b and look-ahead. Sets of these
// are the states.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/utf8.h"
#include "grammar/language.h"

namespace perigee {
namespace {

using Node = PatternNode;
constexpr int64_t kMostNodes = 30'000;       // of an expression whose repetitions are written out
constexpr int64_t kMostPlaces = 20'000'000;  // that all sets of the subset construction may hold, about a second
constexpr int64_t kState = 1'000;            // what a state costs later, in such places
constexpr int64_t kPart = 10;                // what it costs to tell an edge apart by another language's

// Nondeterministic: edges of sets, and of nothing.
struct Places {
  struct Place {
    std::vector<std::pair<CodePoints, int32_t>> edges;
    std::vector<int32_t> empty, at_end;                    // passed without a character, the last only there
    std::vector<std::pair<const Node*, int32_t>> asserts;  // passed where the node holds, which is neither set nor $
  };
  std::vector<Place> all;
  bool has_asserts = false;
  bool asks_for_words = false;  // in look-aheads, too
  CodePoints word_letters;      // by \b and \B outside these: what may be a letter of a word

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
      case Node::Kind::kRepeat: return append_repeated(node, from);
      default: break;
    }
    const int32_t to = add();
    switch (node.kind) {
      case Node::Kind::kSet: all[from].edges.emplace_back(node.set, to); break;
      case Node::Kind::kSequence: all[from].empty.push_back(to); break;
      case Node::Kind::kEnd: all[from].at_end.push_back(to); break;
      case Node::Kind::kWordEdge:
      case Node::Kind::kNoWordEdge: word_letters = node.set; [[fallthrough]];
      default:
        all[from].asserts.emplace_back(&node, to);
        has_asserts = true;
        asks_for_words = asks_for_words || has_word_edge(node);
    }
    return to;
  }

  int32_t append_repeated(const Node& node, int32_t from) {
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

  std::vector<int32_t> closed(std::vector<int32_t> set, bool end) const {
    std::vector<bool> seen(all.size());
    for (const int32_t place : set) seen[place] = true;
    const auto visit = [&](const std::vector<int32_t>& next) {
      for (const int32_t place : next) {
        if (!seen[place]) set.push_back(place);
        seen[place] = true;
      }
    };
    for (size_t i = 0; i < set.size(); ++i) {
      visit(all[set[i]].empty);
      if (end) visit(all[set[i]].at_end);
    }
    std::sort(set.begin(), set.end());
    return set;
  }
};

// The places of texts, from `start`; those that come to `last` match.
struct Search {
  Places places;
  int32_t start = 0, last = 0;
};

// What came before a place. kUnsure: a character about which engines differ, or where nothing depends on it.
enum class Before { kBegin, kLetter, kOther, kUnsure };
// What has to come next. kOther includes the end of the text.
enum class Next { kAnything, kLetter, kOther, kOtherCharacter };

std::optional<Next> both(Next a, Next b) {
  if (a == Next::kAnything || a == b) return b;
  if (b == Next::kAnything) return a;
  if (a == Next::kLetter || b == Next::kLetter) return std::nullopt;
  return Next::kOtherCharacter;
}

CodePoints common(const CodePoints& a, const CodePoints& b) {
  CodePoints out;
  for (const auto& [low, high] : b)
    for (const auto& range : within(a, low, high)) out.push_back(range);
  return out;
}

// `spent` counts places over the whole pattern, look-aheads inside others included.
Result<Language> language_of(const Search& search, int64_t& spent);
Result<Search> search_of(const Node& node, bool from_begin, Before before, int64_t& spent);

// Places without assertions, of others.
class Resolved {
 public:
  static Result<Search> of(const Search& search, Before before, int64_t& spent) {
    Resolved made(search, spent);
    RETURN_IF_ERROR(made.find_behinds());
    const int32_t start =
        made.number({search.start, before, Next::kAnything, {}, std::vector<int32_t>(made.behinds_.size())});
    const int32_t end = made.out_.add();
    for (size_t i = 0; i < made.states_.size(); ++i) {
      if (made.out_.is_full() || spent > kMostPlaces) return Language::too_large();
      RETURN_IF_ERROR(made.expand(State(made.states_[i]), made.places_[i], end));
    }
    return Search{std::move(made.out_), start, end};
  }

 private:
  // Languages in which all that comes from here on has to be, each by one of its states. Sorted.
  using Owed = std::vector<std::pair<int32_t, int32_t>>;
  struct State {
    int32_t place;
    Before before;
    Next next;
    Owed owed;
    std::vector<int32_t> behind;  // by look-behind: its state of behinds_ after what came before
    auto operator<=>(const State&) const = default;
  };
  struct Part {
    CodePoints set;
    Owed owed;
    std::vector<int32_t> behind;
  };

  Resolved(const Search& search, int64_t& spent)
      : from_(search),
        spent_(spent),
        letters_(search.places.word_letters),
        wide_(!within(letters_, 0x80, kLastCodePoint).empty()),
        others_(complement(kWordLetters, wide_ ? kLastCodePoint : 0x7F)) {}

  int32_t number(State state) {
    const auto [at, is_new] = numbers_.emplace(std::move(state), 0);
    if (is_new) {
      at->second = out_.add();
      states_.push_back(at->first);
      places_.push_back(at->second);
    }
    return at->second;
  }

  // The languages of what ends with that for which a look-behind asks.
  Status find_behinds() {
    for (const Places::Place& place : from_.places.all)
      for (const auto& [node, to] : place.asserts) {
        if (node->kind != Node::Kind::kBehind && node->kind != Node::Kind::kNotBehind) continue;
        const auto [at, is_new] = behind_of_.emplace(node, static_cast<int32_t>(behinds_.size()));
        if (!is_new) continue;
        Search inner;
        inner.start = inner.places.add();
        inner.places.all[inner.start].edges.emplace_back(CodePoints{{0, kLastCodePoint}}, inner.start);
        inner.last = inner.places.append(node->parts[0], inner.start);
        if (inner.places.is_full()) return Language::too_large();
        ASSIGN_OR_RETURN(Language made, language_of(inner, spent_));
        behinds_.push_back(std::move(made));
      }
    return {};
  }

  Status expand(const State& state, int32_t at, int32_t end) {
    const Places::Place& place = from_.places.all[state.place];
    for (const auto& [set, to] : place.edges) add_edges(state, set, at, to);
    const auto pass = [&](int32_t to, Next next, Owed owed, std::vector<int32_t> Places::Place::*edges) {
      const int32_t target = number({to, state.before, next, std::move(owed), state.behind});
      (out_.all[at].*edges).push_back(target);
    };
    for (const int32_t to : place.empty) pass(to, state.next, state.owed, &Places::Place::empty);
    const bool may_end = ends(state);
    for (const int32_t to : may_end ? place.at_end : std::vector<int32_t>())
      pass(to, Next::kAnything, {}, &Places::Place::at_end);
    for (const auto& [node, to] : place.asserts) {
      ASSIGN_OR_RETURN(const auto owed, owed_by(*node, state));
      const std::optional<Next> next = owed ? next_by(*node, state) : std::nullopt;
      if (next) pass(to, *next, *owed, &Places::Place::empty);
    }
    if (state.place != from_.last) return {};
    if (state.next == Next::kAnything && state.owed.empty()) {
      out_.all[at].empty.push_back(end);
    } else if (may_end) {
      out_.all[at].at_end.push_back(end);
    }
    return {};
  }

  void add_edges(const State& state, const CodePoints& set, int32_t at, int32_t to) {
    std::vector<Part> parts{{state.next == Next::kAnything ? set
                             : state.next == Next::kLetter ? common(set, letters_)
                                                           : common(set, others_),
                             {},
                             {}}};
    for (const auto& [language, from] : state.owed) {
      std::vector<Part> split;
      for (const Part& part : parts)
        for (const Language::Edge& edge : languages_[language].states()[from].edges) {
          spent_ += kPart;
          Part one{within(part.set, edge.low, edge.high), part.owed, {}};
          if (one.set.empty()) continue;
          if (!is_all(language, edge.to)) one.owed.emplace_back(language, edge.to);
          split.push_back(std::move(one));
        }
      parts = std::move(split);
    }
    for (size_t i = 0; i < behinds_.size(); ++i) {
      if (behinds_[i].is_empty()) {
        for (Part& part : parts) part.behind.push_back(0);
        continue;
      }
      std::vector<Part> split;
      for (const Part& part : parts)
        for (const Language::Edge& edge : behinds_[i].states()[state.behind[i]].edges) {
          spent_ += kPart;
          Part one{within(part.set, edge.low, edge.high), part.owed, part.behind};
          one.behind.push_back(edge.to);
          if (!one.set.empty()) split.push_back(std::move(one));
        }
      parts = std::move(split);
    }
    const auto add = [&](CodePoints characters, Before before, const Part& part) {
      if (characters.empty()) return;
      const int32_t target = number({to, before, Next::kAnything, part.owed, part.behind});
      out_.all[at].edges.emplace_back(std::move(characters), target);
    };
    for (Part& part : parts) {
      std::sort(part.owed.begin(), part.owed.end());
      part.owed.erase(std::unique(part.owed.begin(), part.owed.end()), part.owed.end());
      if (!from_.places.asks_for_words) {
        add(part.set, Before::kUnsure, part);
        continue;
      }
      add(common(part.set, kWordLetters), Before::kLetter, part);
      add(common(part.set, complement(kWordLetters, 0x7F)), Before::kOther, part);
      add(within(part.set, 0x80, kLastCodePoint), Before::kUnsure, part);
    }
  }

  // Whether the text may end here.
  bool ends(const State& state) const {
    return (state.next == Next::kAnything || state.next == Next::kOther) &&
           std::all_of(state.owed.begin(), state.owed.end(),
                       [&](const auto& owed) { return languages_[owed.first].states()[owed.second].accepts; });
  }

  // None: the node does not hold there.
  std::optional<Next> next_by(const Node& node, const State& state) const {
    if (node.kind == Node::Kind::kBegin)
      return state.before == Before::kBegin ? std::optional(state.next) : std::nullopt;
    if (node.kind == Node::Kind::kAhead || node.kind == Node::Kind::kNotAhead) return state.next;
    if (node.kind == Node::Kind::kBehind || node.kind == Node::Kind::kNotBehind) {
      const int32_t which = behind_of_.at(&node);
      const bool matches = !behinds_[which].is_empty() && behinds_[which].states()[state.behind[which]].accepts;
      return matches == (node.kind == Node::Kind::kBehind) ? std::optional(state.next) : std::nullopt;
    }
    const bool is_edge = node.kind == Node::Kind::kWordEdge;
    if (state.before == Before::kUnsure) return wide_ ? std::optional(state.next) : std::nullopt;
    if ((state.before == Before::kLetter) != is_edge) return both(state.next, Next::kLetter);
    // Python's \B, until 3.14, is not in an empty text.
    const bool not_alone = !is_edge && state.before == Before::kBegin && !wide_;
    return both(state.next, not_alone ? Next::kOtherCharacter : Next::kOther);
  }

  // With what a look-ahead adds; none where it cannot hold.
  Result<std::optional<Owed>> owed_by(const Node& node, const State& state) {
    std::optional<Owed> out = state.owed;
    if (node.kind != Node::Kind::kAhead && node.kind != Node::Kind::kNotAhead) return out;
    const auto [at, is_new] = by_node_.emplace(std::pair(&node, state.before), static_cast<int32_t>(languages_.size()));
    if (is_new) {
      ASSIGN_OR_RETURN(const Search inner, search_of(node.parts[0], true, state.before, spent_));
      ASSIGN_OR_RETURN(const Language ahead, language_of(inner, spent_));
      languages_.push_back(node.kind == Node::Kind::kAhead ? ahead : ahead.complement());
    }
    const int32_t language = at->second;
    if (languages_[language].is_empty()) return std::optional<Owed>();
    if (is_all(language, 0)) return out;
    out->emplace_back(language, 0);
    std::sort(out->begin(), out->end());
    out->erase(std::unique(out->begin(), out->end()), out->end());
    return out;
  }

  // Whether any text may follow, and nothing more is owed.
  bool is_all(int32_t language, int32_t at) const {
    const Language::State& state = languages_[language].states()[at];
    return state.accepts && state.edges.size() == 1 && state.edges[0] == Language::Edge{0, kLastCodePoint, at};
  }

  const Search& from_;
  int64_t& spent_;
  const CodePoints letters_;
  const bool wide_;
  const CodePoints others_;
  Places out_;
  std::map<State, int32_t> numbers_;
  std::vector<State> states_;
  std::vector<int32_t> places_;  // of states_
  std::vector<Language> languages_;
  std::map<std::pair<const Node*, Before>, int32_t> by_node_;  // of languages_
  std::vector<Language> behinds_;
  std::map<const Node*, int32_t> behind_of_;  // of behinds_
};

// Of the texts in which the node matches somewhere, or from the beginning on.
Result<Search> search_of(const Node& node, bool from_begin, Before before, int64_t& spent) {
  Search out;
  Places& places = out.places;
  out.start = places.add();
  const CodePoints any = {{0, kLastCodePoint}};
  if (!from_begin) places.all[out.start].edges.emplace_back(any, out.start);
  const int32_t end = places.append(node, out.start);
  out.last = places.add();
  places.all[end].empty.push_back(out.last);
  places.all[out.last].edges.emplace_back(any, out.last);
  spent += static_cast<int64_t>(places.all.size());
  if (places.is_full() || spent > kMostPlaces) return Language::too_large();
  if (!places.has_asserts) return out;
  return Resolved::of(out, before, spent);
}

Result<Language> language_of(const Search& search, int64_t& spent) {
  const Places& places = search.places;
  std::map<std::vector<int32_t>, int32_t> numbers;
  std::vector<const std::vector<int32_t>*> sets;
  const auto number = [&](std::vector<int32_t> set) {
    spent += static_cast<int64_t>(set.size());
    const auto [at, is_new] = numbers.emplace(std::move(set), static_cast<int32_t>(sets.size()));
    if (!is_new) return at->second;
    sets.push_back(&at->first);
    spent += kState;
    return at->second;
  };
  number(places.closed({search.start}, false));
  std::vector<Language::State> out;
  for (size_t i = 0; i < sets.size(); ++i) {
    const std::vector<int32_t>& set = *sets[i];
    const std::vector<int32_t> ended = places.closed(set, true);
    Language::State state{std::binary_search(ended.begin(), ended.end(), search.last), {}};
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
      spent += static_cast<int64_t>(next.size());
      Language::add_edge(state.edges, {from, cuts[at].first - 1, number(places.closed(std::move(next), false))});
      if (sets.size() > 4 * Language::kMostStates || spent > kMostPlaces) return Language::too_large();
    }
    out.push_back(std::move(state));
  }
  return Language::of_states(std::move(out));
}

Result<Search> parsed_search(std::string_view pattern, Reading reading, int64_t& spent) {
  if (pattern.size() > 4096) return Error(Code::kBadInput, "a pattern has at most 4096 bytes");
  ASSIGN_OR_RETURN(const Node node, parse_pattern(pattern, reading));
  return search_of(node, false, Before::kBegin, spent);
}

}  // namespace

Result<Language> Language::of_pattern(std::string_view pattern, Reading reading) {
  int64_t spent = 0;
  ASSIGN_OR_RETURN(const Search search, parsed_search(pattern, reading, spent));
  ASSIGN_OR_RETURN(Language made, language_of(search, spent));
  if (made.states_.size() > kMostStates) return too_large();
  return made;
}

Result<bool> Language::pattern_matches(std::string_view pattern, Reading reading, std::string_view text) {
  int64_t spent = 0;
  ASSIGN_OR_RETURN(const Search search, parsed_search(pattern, reading, spent));
  const Places& places = search.places;
  std::vector<int32_t> set = places.closed({search.start}, text.empty());
  for (size_t i = 0; i < text.size() && !set.empty();) {
    const Utf8Char c = utf8_at(text, i);
    i += c.length;
    std::vector<int32_t> next;
    for (const int32_t place : set)
      for (const auto& [ranges, to] : places.all[place].edges)
        if (contains(ranges, c.code_point)) next.push_back(to);
    std::sort(next.begin(), next.end());
    next.erase(std::unique(next.begin(), next.end()), next.end());
    set = places.closed(std::move(next), i == text.size());
    spent += static_cast<int64_t>(set.size() + places.all.size() / 64);
    if (spent > kMostPlaces) return too_large();
  }
  return std::binary_search(set.begin(), set.end(), search.last);
}

}  // namespace perigee

#include "grammar/rest_chart.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace perigee {
namespace {

using xgrammar::ParserState;

constexpr int32_t kFarAway = 1 << 28;  // the rest of what nothing waits for

uint64_t mixed(uint64_t hash, uint64_t value) {  // splitmix64's finalizer
  hash = (hash ^ value) + 0x9E3779B97F4A7C15;
  hash = (hash ^ (hash >> 30)) * 0xBF58476D1CE4E5B9;
  hash = (hash ^ (hash >> 27)) * 0x94D049BB133111EB;
  return hash ^ (hash >> 31);
}

}  // namespace

RestChart::RestChart(const xgrammar::Grammar& grammar, const Distances& distances, int32_t most_states,
                     int32_t token_bytes)
    : EarleyParser(grammar), distances_(distances), most_states_(most_states), token_bytes_(token_bytes) {
  skip_expired_states_ = true;
  work_ = counts_.back().work = counts_.back().kept = newest_size();
  settle();
}

bool RestChart::advance(uint8_t byte) {
  Count count = counts_.back();
  const bool goes_on = (byte & 0xC0) == 0x80 || count.escape > 0;  // with a character that has begun
  current_token_index_ = count.characters - (goes_on ? 1 : 0);
  const int64_t before = work_;
  if (!scan(byte)) return false;
  if (!expand(kIdWork - (count.work - id_began_) + before)) {
    drop_open_row();
    too_much_ = true;
    return false;
  }
  count.work += work_ - before;
  count.kept += newest_size();
  if (is_crowded() || count.kept > kMostKept) {
    PopLastStates(1);
    too_much_ = true;
    return false;
  }
  count.characters += goes_on ? 0 : 1;
  switch (count.escape) {
    case 0: count.escape = byte == '\\' ? 1 : 0; break;
    case 1: count.escape = byte == 'u' ? 5 : 0; break;
    case 2: count.escape = 0; break;
    default: --count.escape;
  }
  counts_.push_back(count);
  return true;
}

// EarleyParser::Advance in two parts, so that it can stop in between. First it moves the states of the newest row that
// take the byte. False if none does; then nothing has changed.
bool RestChart::scan(uint8_t byte) {
  tmp_states_visited_in_queue_.Clear();
  tmp_states_to_be_added_.clear();
  tmp_completed_lazy_occurrences_.clear();
  tmp_accept_stop_token_ = false;
  for (const ParserState& state : states()) {
    if (IsExpiredState(state)) continue;
    work_ += 1 + std::ssize(distances_.edges(state.element_id)) / kEdgesAUnit;
    Scan(state, byte);
  }
  if (tmp_process_state_queue_.empty() && tmp_states_to_be_added_.empty()) return false;
  if (has_char_budget_rules_) {
    tmp_char_budget_entered_ = char_budget_entry_history_.back();
    char_count_history_.push_back(GetCurrentCharIndex() + (StartsUTF8Codepoint(byte) ? 1 : 0));
  }
  rule_id_to_completable_states_.PushBack(std::vector<std::pair<int32_t, ParserState>>());
  if (capture_tracking_) capture_event_history_.PushBack(std::vector<xgrammar::CaptureEvent>());
  return true;
}

// Then it predicts and completes from those states. False if all work would exceed `most_work`; then drop_open_row().
bool RestChart::expand(int64_t most_work) {
  while (!tmp_process_state_queue_.empty()) {
    const ParserState state = tmp_process_state_queue_.front();
    tmp_process_state_queue_.pop();
    const int64_t cost = cost_of(state);
    if (cost > most_work - work_) {
      work_ += most_states_ / kEdgesAUnit;  // that was looked at
      return false;
    }
    work_ += cost;
    if (std::ssize(tmp_states_to_be_added_) > most_states_ ||
        rule_id_to_completable_states_.Back().size() > most_states_)
      return false;
    const auto [scans, ends] = Predict(state);
    if (ends) Complete(state);
    if (scans) tmp_states_to_be_added_.push_back(state);
  }
  work_ += rule_id_to_completable_states_.Back().size();  // to sum it up
  if (!tmp_completed_lazy_occurrences_.empty()) RemoveCommittedLazyStates();
  is_completed_.push_back(tmp_accept_stop_token_);
  scanable_state_history_.PushBack(tmp_states_to_be_added_);
  if (has_char_budget_rules_) char_budget_entry_history_.push_back(tmp_char_budget_entered_);
  return true;
}

void RestChart::drop_open_row() {
  tmp_process_state_queue_ = {};
  rule_id_to_completable_states_.PopBack(1);
  if (capture_tracking_) capture_event_history_.PopBack(1);
  if (has_char_budget_rules_) char_count_history_.pop_back();
}

// What Predict and Complete will do with a state, at most: known before, because one of them may take the square of a
// row.
int64_t RestChart::cost_of(const ParserState& state) {
  const auto edges = distances_.edges(state.element_id);
  int64_t cost = 1 + std::ssize(edges) / kEdgesAUnit;
  const uint8_t flags = GetFsmStateFlags(state.rule_id, state.element_id);
  if (state.rule_start_pos < 0 || (flags & (kFsmStateEnd | kFsmStateNonTerminal)) == 0) return cost;
  const auto row = rule_id_to_completable_states_[state.rule_start_pos];
  int64_t waiting = 0, their_edges = 0;
  for (const auto& [rule, parent] : row) {
    if (rule != state.rule_id) continue;
    ++waiting;
    their_edges += std::ssize(distances_.edges(parent.element_id));
  }
  cost += row.size() / kEdgesAUnit;
  if ((flags & kFsmStateEnd) != 0) cost += waiting + their_edges / kEdgesAUnit;
  if ((flags & kFsmStateNonTerminal) == 0) return cost;
  // A rule at the end of another one takes over what waits for that, each looked for in the newest row.
  int64_t last = 0;
  for (const auto& edge : edges)
    if (edge.IsRuleRef() && (GetFsmStateFlags(state.rule_id, edge.target) & kFsmStateHasEdges) == 0) ++last;
  const int64_t newest = rule_id_to_completable_states_.Back().size();
  return cost + last * (row.size() + waiting * (newest + last * waiting)) / kEdgesAUnit;
}

void RestChart::settle() {
  const int32_t rows = rule_id_to_completable_states_.size();
  for (int32_t row = static_cast<int32_t>(waiting_.size()); row < rows; ++row) {
    const auto states = rule_id_to_completable_states_[row];
    by_rule_.resize(static_cast<size_t>(states.size()));
    std::iota(by_rule_.begin(), by_rule_.end(), 0);
    std::sort(by_rule_.begin(), by_rule_.end(),
              [&](int32_t a, int32_t b) { return std::pair(states[a].first, a) < std::pair(states[b].first, b); });
    std::vector<Waiting>& sums = waiting_.emplace_back();
    for (const int32_t i : by_rule_)
      if (sums.empty() || sums.back().rule != states[i].first)
        sums.push_back({states[i].first, {kFarAway, 0}, kNotSummed, kUnknown});
    for (const Waiting& sum : sums) settled(sum.rule, row);
  }
}

void RestChart::pop(int32_t bytes) {
  pop_trial(bytes);
  waiting_.resize(std::min<size_t>(waiting_.size(), rule_id_to_completable_states_.size()));
}

const RestChart::Waiting* RestChart::waiting_for(int32_t rule, int32_t row) const {
  const std::vector<Waiting>& sums = waiting_[row];
  const auto found = std::lower_bound(sums.begin(), sums.end(), rule,
                                      [](const Waiting& waiting, int32_t wanted) { return waiting.rule < wanted; });
  return found != sums.end() && found->rule == rule ? &*found : nullptr;
}

// Rows before the last are settled, so this recurs within a row only: as deep as rules begin with one another.
RestChart::Waiting RestChart::settled(int32_t rule, int32_t row) {
  const Waiting* known = waiting_for(rule, row);
  if (known == nullptr) return {rule, {kFarAway, 0}, kNone, {1, 1}};
  if (known->via != kNotSummed) return *known;
  Waiting& sum = waiting_[row][static_cast<size_t>(known - waiting_[row].data())];
  sum.via = kNone;  // while it is summed up, a rule that waits for itself (left recursion) is no way to an end
  sum = sum_up(rule, row);
  return sum;
}

RestChart::Waiting RestChart::sum_up(int32_t rule, int32_t row) {
  Waiting sum{rule, {kFarAway, 0}, kNone, {1, 1}};
  bool all_known = true;
  const auto states = rule_id_to_completable_states_[row];
  const auto begin =
      std::partition_point(by_rule_.begin(), by_rule_.end(), [&](int32_t i) { return states[i].first < rule; });
  for (auto at = begin; at != by_rule_.end() && states[*at].first == rule; ++at) {
    const ParserState& state = states[*at].second;
    const int32_t own = distances_.after_child(state, rule);
    Rest beyond{0, 0};
    CacheKey waits{1, 1};
    if (state.rule_start_pos >= 0) {
      const Waiting next = settled(state.rule_id, state.rule_start_pos);
      beyond = next.rest;
      waits = next.key;
    }
    all_known = all_known && !is_unknown(waits) && state.budget_deadline < 0 && state.char_budget_deadline < 0;
    const CacheKey hash = key_of(state, waits);  // summed up in any order
    sum.key.for_short += hash.for_short;
    sum.key.for_long += hash.for_long;
    if (own + beyond.least < sum.rest.least) {
      sum.rest.least = own + beyond.least;
      sum.via = *at;
    }
    sum.rest.most = std::max(sum.rest.most, own + beyond.most);
  }
  if (!all_known) sum.key = kUnknown;
  return sum;
}

RestChart::CacheKey RestChart::key_of_waiting(int32_t rule, int32_t row) const {
  if (row < 0) return {1, 1};
  const Waiting* known = waiting_for(rule, row);
  return known != nullptr ? known->key : kUnknown;
}

RestChart::CacheKey RestChart::key_of(const ParserState& state, CacheKey waits) const {
  const auto pair = [](int32_t a, int32_t b) {
    return uint64_t{static_cast<uint32_t>(a)} << 32 | static_cast<uint32_t>(b);
  };
  // mixed() takes its arguments together: one of them has to be a hash already.
  const uint64_t at =
      mixed(mixed(1, pair(state.rule_id, state.element_id)), pair(state.sub_element_id, state.partial_codepoint));
  const auto count = [&](int32_t bytes) {
    return static_cast<uint32_t>(distances_.count_that_matters(state, std::min(bytes, token_bytes_)));
  };
  return {mixed(mixed(waits.for_short, at), count(kShortBytes)), mixed(mixed(waits.for_long, at), count(INT32_MAX))};
}

std::optional<RestChart::CacheKey> RestChart::cache_key() const {
  const uint64_t start = mixed(completed() ? 1 : 2, static_cast<uint64_t>(counts_.back().escape));
  CacheKey sum{start, start};
  for (const ParserState& state : states()) {
    const CacheKey waits = key_of_waiting(state.rule_id, state.rule_start_pos);
    if (is_unknown(waits) || state.char_budget_deadline >= 0) return std::nullopt;
    const CacheKey hash = key_of(state, waits);
    const int32_t left = characters_left(state);
    sum.for_short += mixed(hash.for_short, static_cast<uint32_t>(std::min(left, kShortBytes + 1)));
    sum.for_long += mixed(hash.for_long, static_cast<uint32_t>(std::min(left, token_bytes_ + 1)));
  }
  sum.for_long = mixed(sum.for_long, 1);  // apart from those of short ones
  return sum;
}

std::optional<uint64_t> RestChart::row_key(int32_t base, const std::vector<int32_t>& names, int32_t bytes) const {
  const auto pair = [](int64_t a, int64_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b); };
  const int32_t newest = newest_row();
  uint64_t key = pair(counts_.back().escape, static_cast<int64_t>(states().size()));
  bool known = true, near_a_bound = false;
  const auto add = [&](const ParserState& state) {
    const int32_t began = state.rule_start_pos;
    const uint64_t from = began == newest               ? 1
                          : began >= base && began >= 0 ? pair(1, names[static_cast<size_t>(began - base)])
                                                        : pair(2, began);
    const int32_t left = std::min(characters_left(state), bytes + 1);
    near_a_bound = near_a_bound || left <= bytes;
    known = known && state.char_budget_deadline < 0;
    key = mixed(mixed(key, pair(state.rule_id, state.element_id)), from);
    if (state.sub_element_id != 0 || state.partial_codepoint != 0 || state.repeat_count != 0)
      key = mixed(mixed(key, pair(state.sub_element_id, state.partial_codepoint)), pair(3, state.repeat_count));
    key = mixed(key, pair(state.active_temperature_rule_id, left));
  };
  for (const ParserState& state : states()) add(state);
  for (const auto& [rule, state] : rule_id_to_completable_states_[newest]) {
    key = mixed(key, pair(4, rule));
    add(state);
  }
  if (!known) return std::nullopt;
  // What waits may have a bound of its own, which is no nearer.
  if (near_a_bound)
    key = mixed(key, pair(5, counts_.back().characters - counts_[static_cast<size_t>(base)].characters));
  return std::max<uint64_t>(key, 1);
}

RestChart::NextBytes RestChart::next_bytes() const {
  NextBytes bytes;
  // What advance() tells apart: the first bytes of characters, and those of an escape.
  for (const int32_t first : {0, int32_t{'\\'}, '\\' + 1, int32_t{'u'}, 'u' + 1, 0x80, 0xC0})
    bytes.begins.add(static_cast<uint8_t>(first));
  for (const ParserState& state : states()) {
    for (const auto& edge : distances_.edges(state.element_id)) {
      if (!edge.IsCharRange() || edge.min > 255) continue;
      const int32_t last = std::min<int32_t>(edge.max, 255);
      bytes.may.add_range(static_cast<uint8_t>(edge.min), static_cast<uint8_t>(last));
      bytes.begins.add(static_cast<uint8_t>(edge.min));
      if (last < 255) bytes.begins.add(static_cast<uint8_t>(last + 1));
    }
  }
  return bytes;
}

Rest RestChart::after(int32_t rule, int32_t row) const {
  const Waiting* known = row < 0 ? nullptr : waiting_for(rule, row);
  return known != nullptr ? known->rest : Rest{0, 0};
}

Rest RestChart::rest() const {
  Rest rest{completed() ? 0 : INT32_MAX, 0};
  for (const ParserState& state : states()) {
    const int32_t own = distances_.to_rule_end(state);
    const Rest beyond = after(state.rule_id, state.rule_start_pos);
    rest.least = std::min(rest.least, own + beyond.least);
    rest.most = std::max(rest.most, own + beyond.most);
  }
  return rest;
}

std::string RestChart::way() {
  std::string out;
  if (completed()) return out;
  const Rest shortest = rest();
  const ParserState* at = nullptr;
  for (const ParserState& state : states()) {
    const Rest beyond = after(state.rule_id, state.rule_start_pos);
    if (at == nullptr && distances_.to_rule_end(state) + beyond.least == shortest.least) at = &state;
  }
  CHECK(at != nullptr, "a text that cannot go on");
  work_ += states().size();
  distances_.append_to_rule_end(*at, out);
  while (at->rule_start_pos >= 0) {
    ++work_;
    const int32_t rule = at->rule_id, row = at->rule_start_pos;
    const Waiting* known = waiting_for(rule, row);
    CHECK(known != nullptr && known->via >= 0, "a rule that nothing waits for");
    at = &rule_id_to_completable_states_[row][known->via].second;
    distances_.append_after_child(*at, rule, out);
  }
  work_ += std::ssize(out) / kEdgesAUnit;
  return out;
}

}  // namespace perigee

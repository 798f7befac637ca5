#include "grammar/trial_walk.h"

#include <algorithm>

#include "base/check.h"

namespace perigee {

size_t TrialWalk::Targets::place_of(uint64_t key) const {
  const size_t mask = places_.size() - 1;
  size_t at = (key * 0x9E3779B97F4A7C15) >> 32 & mask;
  while (places_[at].first != 0 && places_[at].first != key) at = (at + 1) & mask;
  return at;
}

const TrialWalk::Target* TrialWalk::Targets::find(uint64_t key) const {
  const auto& [found, target] = places_[place_of(key)];
  return found != 0 ? &target : nullptr;
}

void TrialWalk::Targets::add(uint64_t key, Target target) {
  if (2 * ++used_ > places_.size()) {
    std::vector<std::pair<uint64_t, Target>> old(2 * places_.size());
    old.swap(places_);
    for (const auto& place : old)
      if (place.first != 0) places_[place_of(place.first)] = place;
  }
  places_[place_of(key)] = {key, target};
}

TrialWalk::TrialWalk(RestChart& chart, int32_t most_bytes)
    : chart_(chart),
      base_(chart.newest_row()),
      most_bytes_(most_bytes),
      work_before_(chart.work()),
      kept_before_(chart.kept()) {
  chart_.begin_id();
  steps_.push_back({add_node(-1, 0), 0, 0});
}

TrialWalk::~TrialWalk() {
  chart_.pop_trial(static_cast<int32_t>(stands_.size()) - 1);
}

bool TrialWalk::takes(std::string_view token) {
  CHECK(std::ssize(token) <= most_bytes_, "a token of ", token.size(), " bytes");
  const size_t shared = std::mismatch(done_.begin(), done_.end(), token.begin(), token.end()).first - done_.begin();
  done_.resize(shared);
  steps_.resize(shared + 1);
  for (const char byte : token.substr(shared)) {
    const Step at = steps_.back();
    const Target* to = step(at.node, static_cast<uint8_t>(byte));
    if (to == nullptr) return false;
    const Step next{to->node, at.work + to->work, at.kept + nodes_[to->node].kept};
    // By another way than the one on which the row was parsed first, it may cost too much.
    if (next.work > RestChart::kIdWork || kept_before_ + next.kept > RestChart::kMostKept) return false;
    steps_.push_back(next);
    done_ += byte;
  }
  return true;
}

// Null: it may not follow.
const TrialWalk::Target* TrialWalk::step(int32_t node, uint8_t byte) {
  ++steps_taken_;
  RestChart::NextBytes& next = nodes_[node].next;
  if (!next.may.has(byte)) return nullptr;
  const uint8_t first = next.begins.last_up_to(byte);
  const uint64_t key = (static_cast<uint64_t>(node) + 1) << 8 | first;
  if (const Target* known = edges_.find(key)) return known;
  stand_at(node);
  const int64_t before = chart_.work();
  if (!chart_.advance(byte)) {
    next.may.remove_range(first, static_cast<uint8_t>(next.begins.first_above(byte) - 1));
    return nullptr;
  }
  const int64_t work = chart_.work() - before;
  edges_.add(key, {add_node(node, byte), work});
  return edges_.find(key);
}

// For the newest row, which is one of stands_ afterwards unless the same is known.
int32_t TrialWalk::add_node(int32_t before, uint8_t byte) {
  const auto key = chart_.row_key(base_, stands_, most_bytes_);
  if (const Target* known = key ? known_.find(*key) : nullptr) {
    chart_.pop_trial(1);
    return known->node;
  }
  const auto node = static_cast<int32_t>(nodes_.size());
  if (key) known_.add(*key, {node, 0});
  nodes_.push_back({before, byte, chart_.newest_size(), chart_.next_bytes()});
  stands_.push_back(node);
  return node;
}

// Takes the chart to the row of a node, by the bytes that led to it first.
void TrialWalk::stand_at(int32_t node) {
  if (stands_.back() == node) return;
  way_.clear();
  for (int32_t at = node; at >= 0; at = nodes_[at].before) way_.push_back(at);
  std::reverse(way_.begin(), way_.end());
  const size_t shared = std::mismatch(stands_.begin(), stands_.end(), way_.begin(), way_.end()).first - stands_.begin();
  chart_.pop_trial(static_cast<int32_t>(stands_.size() - shared));
  stands_.resize(shared);
  for (size_t i = shared; i < way_.size(); ++i) {
    CHECK(chart_.advance(nodes_[way_[i]].byte), "a row that was parsed before");
    stands_.push_back(way_[i]);
  }
}

}  // namespace perigee

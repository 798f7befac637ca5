#include "grammar/trial_walk.h"

#include <algorithm>

#include "base/check.h"

namespace perigee {

void TrialWalk::Known::clear() {
  places_.assign(kFewPlaces, {});
  used_ = 0;
}

size_t TrialWalk::Known::place_of(uint64_t key) const {
  const size_t mask = places_.size() - 1;
  size_t at = (key * 0x9E3779B97F4A7C15) >> 32 & mask;
  while (places_[at].first != 0 && places_[at].first != key) at = (at + 1) & mask;
  return at;
}

int32_t TrialWalk::Known::find_or_add(uint64_t key, int32_t node) {
  if (const auto& [found, known] = places_[place_of(key)]; found != 0) return known;
  if (2 * ++used_ > places_.size()) {
    std::vector<std::pair<uint64_t, int32_t>> old(2 * places_.size());
    old.swap(places_);
    for (const auto& place : old)
      if (place.first != 0) places_[place_of(place.first)] = place;
  }
  places_[place_of(key)] = {key, node};
  return node;
}

TrialWalk::TrialWalk(RestChart& chart, int32_t most_bytes, Room& room)
    : chart_(chart),
      base_(chart.newest_row()),
      most_bytes_(most_bytes),
      work_before_(chart.work()),
      kept_before_(chart.kept()),
      room_(room) {
  chart_.begin_id();
  room_.nodes.clear();
  room_.edges.clear();
  room_.known.clear();
  room_.stands.clear();
  room_.steps.resize(static_cast<size_t>(most_bytes) + 1);
  room_.steps[0] = {add_node(-1, 0), 0, 0};
}

TrialWalk::~TrialWalk() {
  chart_.pop_trial(static_cast<int32_t>(room_.stands.size()) - 1);
  if (room_.nodes.size() > kMostNodesKept) room_ = {};
}

bool TrialWalk::takes(std::string_view token) {
  CHECK(std::ssize(token) <= most_bytes_, "a token of ", token.size(), " bytes");
  const size_t alike = std::min(token.size(), last_.size());
  size_t at = 0;
  while (at < alike && token[at] == last_[at]) ++at;
  if (at > went_) return false;  // it has the byte that the last one was refused for
  last_ = token;
  for (went_ = at; went_ < token.size(); ++went_) {
    const Step here = room_.steps[went_];
    const auto byte = static_cast<uint8_t>(token[went_]);
    const Node& node = room_.nodes[here.node];
    const size_t index = node.edges + node.kinds[byte];
    ++steps_taken_;
    if (room_.edges[index].to == kUntried) try_edge(index, here.node, byte);
    const Edge edge = room_.edges[index];
    if (edge.to == kRefused) return false;
    const Step next{edge.to, here.work + edge.work, here.kept + room_.nodes[edge.to].kept};
    // By another way than the one on which the row was parsed first, it may cost too much.
    if (next.work > RestChart::kIdWork || kept_before_ + next.kept > RestChart::kMostKept) return false;
    room_.steps[went_ + 1] = next;
  }
  return true;
}

void TrialWalk::try_edge(size_t edge, int32_t node, uint8_t byte) {
  stand_at(node);
  const int64_t before = chart_.work();
  const bool goes = chart_.advance(byte);
  const int64_t work = chart_.work() - before;
  const int32_t to = goes ? add_node(node, byte) : kRefused;  // which may move the edges
  room_.edges[edge] = {to, work};
}

// For the newest row, which is one of those it stands on afterwards unless the same is known.
int32_t TrialWalk::add_node(int32_t before, uint8_t byte) {
  const auto key = chart_.row_key(base_, room_.stands, most_bytes_);
  const auto index = static_cast<int32_t>(room_.nodes.size());
  if (const int32_t known = key ? room_.known.find_or_add(*key, index) : index; known != index) {
    chart_.pop_trial(1);
    return known;
  }
  Node& node = room_.nodes.emplace_back();
  node.before = before;
  node.byte = byte;
  node.edges = room_.edges.size();
  node.kept = chart_.newest_size();
  const RestChart::NextBytes next = chart_.next_bytes();
  for (int32_t first = 0, kind = 0, end; first < 256; first = end, ++kind) {
    end = next.begins.first_above(static_cast<uint8_t>(first));
    std::fill(node.kinds.begin() + first, node.kinds.begin() + end, static_cast<uint8_t>(kind));
    room_.edges.push_back({next.may.has(static_cast<uint8_t>(first)) ? kUntried : kRefused, 0});
  }
  room_.stands.push_back(index);
  return index;
}

// Takes the chart to the row of a node, by the bytes that led to it first.
void TrialWalk::stand_at(int32_t node) {
  if (room_.stands.back() == node) return;
  room_.way.clear();
  for (int32_t at = node; at >= 0; at = room_.nodes[at].before) room_.way.push_back(at);
  std::reverse(room_.way.begin(), room_.way.end());
  std::vector<int32_t>&stands = room_.stands, &way = room_.way;
  const size_t shared = std::mismatch(stands.begin(), stands.end(), way.begin(), way.end()).first - stands.begin();
  chart_.pop_trial(static_cast<int32_t>(stands.size() - shared));
  stands.resize(shared);
  for (size_t i = shared; i < way.size(); ++i) {
    CHECK(chart_.advance(room_.nodes[way[i]].byte), "a row that was parsed before");
    stands.push_back(way[i]);
  }
}

}  // namespace perigee

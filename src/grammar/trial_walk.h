// TrialWalk: which of some tokens may follow in a chart, each tried byte by byte.
//
// Many tokens come to the same rows: after any letter of a string the chart stands as before it, and what may follow
// its quote is the same for all of them. So rows are told apart by what the bytes after them depend on
// (RestChart::row_key), and of the bytes that lead from one to the same row (RestChart::next_bytes) one is parsed: the
// automaton of the rows that tokens reach, made as far as they go. A token that is taken costs no more than RestChart
// allows an id.
//
// Only text_cursor.cc includes this.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "grammar/rest_chart.h"

namespace perigee {

class TrialWalk {
 public:
  class Room;
  // Of tokens of at most `most_bytes` bytes, from the newest row on, which is the newest again once the walk is gone.
  // Walks may have a room one after the other.
  TrialWalk(RestChart& chart, int32_t most_bytes, Room& room);
  ~TrialWalk();
  TrialWalk(const TrialWalk&) = delete;
  TrialWalk& operator=(const TrialWalk&) = delete;

  // Whether the token may follow. Fastest where tokens come in the order of their bytes. They outlive the walk.
  bool takes(std::string_view token);
  // What has been done, in units of RestChart.
  int64_t work() const { return chart_.work() - work_before_ + steps_taken_ / kStepsAUnit; }

 private:
  static constexpr size_t kMostNodesKept = 256;  // in a room: what a hostile grammar took is given back
  static constexpr int64_t kStepsAUnit = 8;      // a known step is that much cheaper than a visit of a state
  // A row, by the first bytes that led to it.
  struct Node {
    int32_t before;  // the node from which `byte` led here
    uint8_t byte;
    std::array<uint8_t, 256> kinds;  // of next bytes, of which each leads to one row
    size_t edges;                    // its first one, that of kind 0
    int64_t kept;
  };
  static constexpr int32_t kRefused = -1, kUntried = -2;
  struct Edge {
    int32_t to;
    int64_t work;
  };
  // The nodes of keys, of which none is 0. Open addressing, at most half full.
  class Known {
   public:
    void clear();
    // The node of a key that has one; otherwise `node` is its node from now on.
    int32_t find_or_add(uint64_t key, int32_t node);

   private:
    size_t place_of(uint64_t key) const;
    static constexpr size_t kFewPlaces = 128;  // as many as most walks need
    std::vector<std::pair<uint64_t, int32_t>> places_;
    size_t used_ = 0;
  };
  // A place in the token that was tried last, with the costs of all before it.
  struct Step {
    int32_t node;
    int64_t work, kept;
  };

  void try_edge(size_t edge, int32_t node, uint8_t byte);
  int32_t add_node(int32_t before, uint8_t byte);
  void stand_at(int32_t node);

  RestChart& chart_;
  const int32_t base_;  // the row that tokens begin at
  const int32_t most_bytes_;
  const int64_t work_before_, kept_before_;
  int64_t steps_taken_ = 0;
  Room& room_;
  std::string_view last_;  // the token that was tried last
  size_t went_ = 0;        // its bytes that may follow
};

// The memory of a walk.
class TrialWalk::Room {
  friend class TrialWalk;
  std::vector<Node> nodes;
  std::vector<Edge> edges;
  Known known;                  // by row_key()
  std::vector<int32_t> stands;  // the nodes of the chart's rows from base_ on
  std::vector<int32_t> way;     // scratch of stand_at()
  std::vector<Step> steps;      // before each byte of last_ that went, and after the last
};

}  // namespace perigee

// TriedTokens: which tokens a parser took where its tables of tokens left it open, remembered by what that depends on.
//
// One for a compiled grammar, shared by all texts of it. Bounded: when one generation is full the older one is dropped.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace perigee {

class TriedTokens {
 public:
  using Ids = std::shared_ptr<const std::vector<int32_t>>;

  // The ids that were taken there; null if it is not known.
  Ids find(uint64_t place) {
    const std::lock_guard lock(mutex_);
    if (const auto known = newer_.ids.find(place); known != newer_.ids.end()) return known->second;
    const auto known = older_.ids.find(place);
    if (known == older_.ids.end()) return nullptr;
    return add(place, known->second);
  }

  void keep(uint64_t place, const std::vector<int32_t>& ids) {
    auto own = std::make_shared<const std::vector<int32_t>>(ids);
    const std::lock_guard lock(mutex_);
    add(place, std::move(own));
  }

  static constexpr size_t kMostBytes = 2 << 20;

 private:
  struct Generation {
    std::unordered_map<uint64_t, Ids> ids;
    size_t bytes = 0;
  };

  Ids add(uint64_t place, Ids ids) {
    constexpr size_t kOwnBytes = 128;  // of an entry
    if (newer_.bytes > kMostBytes / 2) {
      older_ = std::move(newer_);
      newer_ = {};
    }
    newer_.bytes += kOwnBytes + ids->size() * sizeof(int32_t);
    newer_.ids.insert_or_assign(place, ids);
    return ids;
  }

  std::mutex mutex_;
  Generation newer_, older_;
};

}  // namespace perigee

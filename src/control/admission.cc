#include "control/admission.h"

#include <algorithm>
#include <array>

#include "control/faults.h"

namespace perigee {

// One that holds all pages that it can ever fill needs none.
int32_t reserve_page_each(std::span<Sequence* const> running, int32_t /*num_pages*/) {
  return static_cast<int32_t>(std::count_if(running.begin(), running.end(), [](const Sequence* sequence) {
    return static_cast<int32_t>(sequence->running().pages.size()) < sequence->max_blocks();
  }));
}

// The longest confirmed prefix that leaves at least one token to compute, for its logits.
void Admission::match_prefix(const Sequence& sequence) {
  const int32_t last = planted(Fault::kFullPromptHit)
                           ? sequence.num_input()
                           : std::min(sequence.num_input() - 1, states_.num_chunked(sequence));
  const bool may_hit = rules_.config.prefix_caching && !sequence.wants_prompt_logprobs();
  match_.update(sequence, may_hit ? last / kBlockTokens : 0);
}

// What of the match every kind of cache can serve: a recurrent model needs a checkpoint at exactly its end, or a tail
// with a state of its own.
Hit Admission::find_hit(int32_t tail_tokens) const {
  const std::vector<PrefixNode>& blocks = match_.blocks();
  const Checkpoints& checkpoints = cache_.checkpoints();
  const auto end_of = [&](int32_t num_blocks) { return blocks[static_cast<size_t>(num_blocks) - 1].page; };
  Hit hit;
  hit.num_matched = static_cast<int32_t>(blocks.size()) / rules_.hit_blocks * rules_.hit_blocks;
  hit.num_blocks = hit.num_matched;
  hit.tail_tokens = tail_tokens;
  if (rules_.is_recurrent() && tail_tokens == 0 && !planted(Fault::kHitMaxOverGroups))
    while (hit.num_blocks > 0 && checkpoints.at(end_of(hit.num_blocks)).serial == 0)
      hit.num_blocks -= rules_.hit_blocks;
  for (int32_t block = 1; block <= hit.num_blocks; ++block)
    cache_.pools().count_if_idle(end_of(block), hit.num_idle_pages);
  if (rules_.is_recurrent() && hit.num_blocks > 0) hit.checkpoint = checkpoints.at(end_of(hit.num_blocks));
  if (hit.checkpoint.serial != 0 && tail_tokens == 0) checkpoints.count_idle_pages(hit.checkpoint, hit.num_idle_pages);
  return hit;
}

// For num_blocks blocks, of which the hit has the first, and for so many states at every index. The reserve is left
// wherever blocks may lie: dealt in turn at every index, since all that run may need their next page at the same one.
bool Admission::has_room(const Hit& hit, int32_t num_blocks, int32_t num_states, int32_t reserve) const {
  const Pools& pools = cache_.pools();
  const int32_t num_held = hit.num_blocks + (hit.tail_tokens > 0 ? 1 : 0);
  const int32_t state_pages = rules_.config.state_pages * num_states;
  int32_t num_left = 0;
  for (int32_t index = 0; index < pools.dcp_size(); ++index) {
    const int32_t num_available = pools.num_available(index) - hit.num_idle_pages[static_cast<size_t>(index)];
    if (num_available < state_pages) return false;
    const int32_t num_for_blocks = num_available - state_pages;
    const int32_t num_own =
        num_dealt_in_turn(num_blocks, index, pools.dcp_size()) - num_dealt_in_turn(num_held, index, pools.dcp_size());
    if (rules_.config.dealing() == Dealing::kInTurn && num_for_blocks < num_own + reserve) return false;
    num_left += num_for_blocks;
  }
  return num_left >= num_blocks - num_held + reserve;
}

std::optional<Hit> Admission::find_room(const Sequence& sequence, std::span<Sequence* const> running, bool alone,
                                        bool has_tail) {
  const SchedulerConfig& config = rules_.config;
  const int32_t num_pages = cache_.pools().num_pages();
  const bool reserves = config.admission_reserve != nullptr && !alone;
  const int32_t reserve = reserves ? config.admission_reserve(running, num_pages) : 0;
  const int32_t num_wanted = std::min(num_blocks(sequence.num_input()) + 1, sequence.max_blocks());
  match_prefix(sequence);
  const auto num_matched = static_cast<int32_t>(match_.blocks().size());
  const bool from_tail = has_tail && num_matched == rules_.handover_blocks(sequence.num_prompt());
  const int32_t num_states = from_tail ? 0 : 1;
  // Looked at before each step while it waits: most of the time no hit could be long enough.
  Hit longest{.num_blocks = num_matched};
  if (from_tail) longest.tail_tokens = sequence.num_prompt() - 1 - longest.num_tokens();
  if (!alone && !has_room(longest, num_wanted, num_states, reserve)) return {};
  Hit hit = find_hit(longest.tail_tokens);
  // A hit holds a checkpoint's pages for a while, and its blocks fill the indices where they are. Where even empty
  // pools have no room for that, it is computed instead.
  if (alone && !has_room(hit, num_wanted, num_states, reserve) && !from_tail) hit = Hit{.num_matched = hit.num_matched};
  if (!has_room(hit, num_wanted, num_states, reserve)) return {};
  return hit;
}

Admission::ImportRoom Admission::find_import_room(const Sequence& sequence, std::span<Sequence* const> running,
                                                  bool alone) {
  const SchedulerConfig& config = rules_.config;
  const bool reserves = config.admission_reserve != nullptr && !alone;
  const int32_t reserve = reserves ? config.admission_reserve(running, cache_.pools().num_pages()) : 0;
  const int32_t num_blocks = sequence.request.remote_blocks;
  match_prefix(sequence);
  const bool may_hit =
      num_blocks <= rules_.handover_blocks(sequence.num_prompt()) && num_blocks % rules_.hit_blocks == 0;
  if (!may_hit || !config.prefix_caching || sequence.wants_prompt_logprobs()) return {};
  if (find_hit(0).num_blocks >= num_blocks) return {};
  const bool has_tail = num_blocks == rules_.handover_blocks(sequence.num_prompt()) &&
                        rules_.handover_tokens(sequence.num_prompt()) % kBlockTokens != 0;
  const auto room_with = [&](int32_t num_cached, bool tail_too) {
    Hit cached{.num_blocks = num_cached};
    for (int32_t block = 0; block < num_cached; ++block)
      cache_.pools().count_if_idle(match_.blocks()[static_cast<size_t>(block)].page, cached.num_idle_pages);
    return has_room(cached, num_blocks + (tail_too ? 1 : 0), tail_too ? 2 : 1, reserve);
  };
  const int32_t num_matched = std::min(num_blocks, static_cast<int32_t>(match_.blocks().size()));
  if (room_with(num_matched, has_tail))
    return {.num_blocks = num_blocks, .num_cached = num_matched, .has_tail = has_tail};
  if (!alone) return {.waits = true};
  if (room_with(num_matched, false)) return {.num_blocks = num_blocks, .num_cached = num_matched};
  if (room_with(0, false)) return {.num_blocks = num_blocks};
  return {};
}

std::vector<PageHandle> Admission::take(const ImportRoom& room, PrefixNode& chain) {
  std::vector<PageHandle> handles;
  for (int32_t block = 0; block < room.num_cached; ++block)
    handles.push_back(cache_.pools().share(match_.blocks()[static_cast<size_t>(block)].page));
  chain = room.num_cached > 0 ? match_.blocks()[static_cast<size_t>(room.num_cached) - 1] : match_.root();
  return handles;
}

std::vector<PageHandle> Admission::take(const Hit& hit, Running& run) {
  const auto end = static_cast<size_t>(hit.num_blocks);
  for (size_t block = 0; block < end; ++block) run.add_block(cache_.pools().share(match_.blocks()[block].page));
  run.chain = end > 0 ? match_.blocks()[end - 1] : match_.root();
  run.num_chained = hit.num_blocks;
  run.newest_checkpoint = hit.checkpoint;
  run.junction = rules_.checkpoints.junction(hit.num_blocks * kBlockTokens, hit.num_matched * kBlockTokens);
  std::vector<PageHandle> checkpoint;
  if (hit.checkpoint.serial != 0 && hit.tail_tokens == 0) cache_.checkpoints().share(hit.checkpoint, checkpoint);
  return checkpoint;
}

void PrefixMatch::update(const Sequence& sequence, int32_t max_blocks) {
  if (sequence.id() != sequence_ || sequence.input != input_ || max_blocks != max_blocks_) {
    sequence_ = sequence.id();
    input_ = sequence.input;
    max_blocks_ = max_blocks;
    root_ = index_.root(sequence.request.cache_salt);
    blocks_.clear();
    num_published_ = num_erased_ = -1;
  }
  if (num_erased_ != index_.num_erased() && !planted(Fault::kStaleMatch)) {
    const auto is_gone = [this](const PrefixNode& block) { return !index_.contains(block); };
    blocks_.erase(std::find_if(blocks_.begin(), blocks_.end(), is_gone), blocks_.end());
  }
  if (num_published_ != index_.num_published()) {
    std::array<int32_t, kBlockTokens> scratch;
    while (static_cast<int32_t>(blocks_.size()) < max_blocks) {
      const auto block = static_cast<int32_t>(blocks_.size());
      const auto found = index_.find(blocks_.empty() ? root_ : blocks_.back(), sequence.block_tokens(block, scratch),
                                     sequence.request.cache_salt, sequence.extra_key(block));
      if (!found) break;
      blocks_.push_back(*found);
    }
  }
  num_published_ = index_.num_published();
  num_erased_ = index_.num_erased();
}

}  // namespace perigee

#include "sim/simulation.h"

#include <algorithm>
#include <utility>

#include "sim/chain_constraint.h"

namespace perigee::sim {
namespace {

constexpr int64_t kMaxTicks = 200000;

int32_t shared_token(uint64_t stream, int32_t position) {
  return static_cast<int32_t>(random_u64(stream + 77, static_cast<uint64_t>(position)) % kVocabulary);
}

}  // namespace

Simulation::Simulation(uint64_t seed, const Shape& shape) : Simulation(seed, shape, draw(seed, shape)) {}

Simulation::Simulation(uint64_t seed, const Shape& shape, const Drawn& drawn)
    : Harness(Judge{seed, 0}, drawn.rng, drawn.config, shape.num_ranks) {
  num_to_submit_ = static_cast<int32_t>(rng_.between(30, 120));
  queue_length_ = static_cast<int32_t>(rng_.between(4, 64));
  longest_prompt_ = rng_.chance(config_.state_pages > 0 ? 0.6 : 0.4) ? 70
                    : rng_.chance(0.5)                               ? 140
                                                                     : config_.max_model_len - 1;
  long_outputs_chance_ = rng_.chance(0.8) ? 0.8 : 0.2;
  turn_chance_ = rng_.chance(config_.state_pages > 0 ? 0.8 : 0.5) ? 0.6 : 0.1;
  arrival_chance_ = rng_.chance(0.9) ? 0.5 : 0.08;
  cancel_chance_ = rng_.chance(0.8) ? 0.05 : 0.0;
  deliver_chance_ = rng_.chance(0.5) ? 0.3 : 0.7;
}

Simulation::Drawn Simulation::draw(uint64_t seed, const Shape& shape) {
  Rng rng(seed);
  SchedulerConfig config;
  int32_t num_blocks = static_cast<int32_t>(rng.between(6, rng.chance(0.8) ? 20 : 60));
  config.max_sequences = static_cast<int32_t>(rng.chance(0.94) ? rng.between(10, 24) : rng.between(1, 4));
  config.num_pages = num_blocks;
  if (rng.chance(0.5)) draw_recurrent(rng, config, num_blocks);
  config.max_model_len = static_cast<int32_t>(rng.between(200, std::min(num_blocks * kBlockTokens + 1, 700)));
  config.deterministic = rng.chance(0.4);
  constexpr int32_t kAlignments[] = {1, 16, 64, 96, 128};
  config.attention_alignment = kAlignments[rng.below(5)];
  config.max_step_tokens =
      static_cast<int32_t>(config.attention_alignment + (rng.chance(0.12) ? rng.between(4, 40) : rng.between(60, 500)));
  if (rng.chance(0.3)) config.long_prefill_tokens = static_cast<int32_t>(rng.between(20, 150));
  config.prefix_caching = rng.chance(0.95);
  if (rng.chance(0.95)) config.admission_reserve = nullptr;  // so that many are preempted
  config.hash_seed = rng.next();
  config.hash_bits = rng.chance(0.25) ? 4 : 128;
  if (shape.num_drafts > 0) config.num_drafts = static_cast<int32_t>(rng.between(1, shape.num_drafts));
  draw_dcp(seed, shape.max_dcp, num_blocks, config);
  return {rng, config};
}

// A recurrent model: room for checkpoints and few that run, or more that want to run than the pool can bear.
void Simulation::draw_recurrent(Rng& rng, SchedulerConfig& config, int32_t& num_blocks) {
  const bool roomy = rng.chance(0.3);
  config.state_pages = static_cast<int32_t>(rng.between(1, roomy ? 4 : 2));
  constexpr int32_t kIntervals[] = {0, 1, 1, 2, 64};
  config.checkpoint_interval_blocks = kIntervals[rng.below(5)];
  config.checkpoint_rolling_blocks = static_cast<int32_t>(rng.below(4));
  if (roomy) config.max_sequences = static_cast<int32_t>(rng.between(4, 10));
  if (!roomy) num_blocks = static_cast<int32_t>(rng.between(6, 14));
  const int32_t num_states = static_cast<int32_t>(roomy ? rng.between(14, 28) : rng.between(12, 20));
  config.num_pages = std::min(num_blocks + config.state_pages * num_states, kMaxPages);
}

// As many pages in all as with one index, or so: few at each. Draws nothing that other seeds would miss.
void Simulation::draw_dcp(uint64_t seed, int32_t max_dcp, int32_t num_blocks, SchedulerConfig& config) {
  int32_t num_sizes = 1;
  while (1 << num_sizes <= max_dcp) ++num_sizes;
  const int32_t dcp = 1 << random_u64(seed, 16) % static_cast<uint64_t>(num_sizes);
  if (dcp == 1) return;
  config.dcp_size = dcp;
  const int32_t pages_of_states = config.num_pages - num_blocks;
  const int32_t pages_of_blocks = (num_blocks + dcp - 1) / dcp;
  config.num_pages = config.state_pages == 0 ? pages_of_blocks
                                             : std::clamp(pages_of_blocks + pages_of_states,
                                                          pages_of_blocks + config.state_pages, kMaxPages / dcp);
}

Counts Simulation::run() {
  while (num_to_submit_ > 0 || !scheduler_.idle()) {
    tick();
    judge_.require(judge_.tick < kMaxTicks, "no end in sight");
    if (lost_) break;
  }
  if (!lost_) check_end();
  const SchedulerGauges gauges = scheduler_.gauges();
  counts_.preemptions = gauges.preemptions;
  counts_.checkpoint_writes = gauges.checkpoint_writes;
  counts_.checkpoint_hits = gauges.checkpoint_hits;
  counts_.checkpoint_evictions = gauges.checkpoint_evictions;
  counts_.checkpoint_skips = gauges.checkpoint_skips;
  if (config_.state_pages > 0) counts_.hybrid_steps = counts_.steps;
  counts_.requests = static_cast<int64_t>(requests_.size());
  return counts_;
}

void Simulation::tick() {
  ++judge_.tick;
  now_s_ += rng_.unit() * 0.01;
  if (num_to_submit_ > 0 && rng_.chance(queue_is_full() ? 0.02 : arrival_chance_)) submit_some();
  if (rng_.chance(cancel_chance_)) cancel_some();
  if (rng_.chance(0.002)) scheduler_.drop_prefix_cache();
  if (rng_.chance(0.7)) plan_step();
  if (rng_.chance(0.5)) give_masks();
  run_ranks();
  if (!flights_.empty() && rng_.chance(deliver_chance_)) deliver();
  if (ranks_.size() > 1 && rng_.chance(0.0001)) return lose_rank();
  check_books();
}

// No result follows: every stream ends, exactly once, and what the plans in flight touch stays theirs.
void Simulation::lose_rank() {
  lost_ = true;
  ++counts_.lost_ranks;
  for (const int64_t sequence : std::vector<int64_t>(live_)) {
    requests_[static_cast<size_t>(sequence)].cancelled = true;
    scheduler_.cancel({SequenceId(sequence), FinishReason::kCancelled});
  }
  take_updates();
  judge_.require(live_.empty(), live_.size(), " sequences outlive their rank");
  check_books();
  judge_.require(scheduler_.idle() == flights_.empty(), "plans in flight are forgotten");
  judge_.require(!scheduler_.next_plan(now_s_), "a plan for a rank that is lost");
}

int32_t Simulation::draw_length() {
  const int32_t longest = std::min(longest_prompt_, config_.max_model_len - 1);
  if (rng_.chance(0.5)) return static_cast<int32_t>(rng_.between(1, longest));
  const int64_t blocks = rng_.between(1, std::max(1, longest / kBlockTokens));
  return static_cast<int32_t>(std::clamp<int64_t>(blocks * kBlockTokens + rng_.between(-1, 1), 1, longest));
}

// A shared stream, or a former request and its outputs, up to some point; after it tokens of its own.
std::shared_ptr<const std::vector<int32_t>> Simulation::draw_prompt() {
  const auto prompt = std::make_shared<std::vector<int32_t>>();
  const int32_t length = draw_length();
  if (!requests_.empty() && rng_.chance(0.3)) {
    const Request& former = requests_[rng_.below(requests_.size())];
    *prompt = *former.submit.prompt;
    prompt->insert(prompt->end(), former.ids.begin(), former.ids.end());
  } else {
    const uint64_t stream = rng_.below(3);
    for (int32_t i = 0; i < length; ++i) prompt->push_back(shared_token(stream, i));
  }
  if (static_cast<int32_t>(prompt->size()) > length) prompt->resize(static_cast<size_t>(length));
  if (rng_.chance(0.4)) {
    for (size_t i = rng_.below(prompt->size() + 1); i < prompt->size(); ++i)
      (*prompt)[i] = static_cast<int32_t>(rng_.below(kVocabulary));
  }
  while (static_cast<int32_t>(prompt->size()) < length)
    prompt->push_back(static_cast<int32_t>(rng_.below(kVocabulary)));
  return prompt;
}

// A former request, all that it gave so far, and some tokens more; unless that is too long.
void Simulation::draw_next_turn(std::shared_ptr<const std::vector<int32_t>>& prompt, std::string& salt) {
  if (requests_.empty()) return;
  const Request& former = requests_[requests_.size() - 1 - rng_.below(std::min<size_t>(requests_.size(), 16))];
  auto turn = std::make_shared<std::vector<int32_t>>(*former.submit.prompt);
  turn->insert(turn->end(), former.ids.begin(), former.ids.end());
  for (uint64_t i = rng_.between(1, 40); i > 0; --i) turn->push_back(static_cast<int32_t>(rng_.below(kVocabulary)));
  if (static_cast<int32_t>(turn->size()) >= config_.max_model_len) return;
  prompt = std::move(turn);
  salt = former.submit.cache_salt;
}

std::shared_ptr<const SamplingParams> Simulation::draw_sampling(int32_t num_prompt) {
  const auto sampling = std::make_shared<SamplingParams>();
  const int32_t room = config_.max_model_len - num_prompt;
  const int32_t wanted =
      static_cast<int32_t>(rng_.chance(long_outputs_chance_) ? rng_.between(40, 250) : rng_.between(1, 24));
  sampling->max_tokens = std::min(wanted, room);
  sampling->min_tokens = rng_.chance(0.2) ? static_cast<int32_t>(rng_.between(1, 10)) : 0;
  sampling->seed = rng_.next();
  if (rng_.chance(0.4)) {
    for (uint64_t i = rng_.between(1, 20); i > 0; --i)
      sampling->stop_ids.push_back(static_cast<int32_t>(rng_.below(kVocabulary)));
  }
  if (rng_.chance(0.1)) sampling->prompt_logprobs = 0;
  return sampling;
}

void Simulation::submit_some() {
  auto prompt = draw_prompt();
  std::string salt = rng_.chance(0.7) ? "" : rng_.chance(0.5) ? "a" : "b";
  if (rng_.chance(turn_chance_)) draw_next_turn(prompt, salt);
  const int64_t group = rng_.chance(0.12) ? rng_.between(2, 4) : 1;
  const SequenceId leader(static_cast<int64_t>(requests_.size()));
  for (int64_t i = 0; i < group && !queue_is_full(); ++i) submit_one(prompt, salt, i == 0 ? SequenceId() : leader);
  --num_to_submit_;
}

void Simulation::submit_one(const std::shared_ptr<const std::vector<int32_t>>& prompt, const std::string& salt,
                            SequenceId leader) {
  Submit submit;
  submit.sequence = SequenceId(static_cast<int64_t>(requests_.size()));
  submit.prompt = prompt;
  submit.sampling = draw_sampling(static_cast<int32_t>(prompt->size()));
  submit.priority = static_cast<int32_t>(rng_.chance(0.8) ? 0 : rng_.between(-1, 1));
  submit.arrival_s = now_s_;
  submit.deadline_s = rng_.chance(0.08) ? now_s_ + rng_.unit() * 3 : 0;
  submit.cache_salt = salt;
  submit.leader = leader;
  if (random_u64(judge_.seed + 17, static_cast<uint64_t>(submit.sequence.value)) % 3 == 0)
    submit.constraint = std::make_shared<ChainConstraint>(submit.sampling->seed);
  Harness::submit(std::move(submit));
}

void Simulation::cancel_some() {
  if (requests_.empty()) return;
  SequenceId sequence(static_cast<int64_t>(rng_.below(requests_.size() + 1)));  // ended and unknown ones too
  if (!live_.empty() && rng_.chance(0.8)) sequence = SequenceId(live_[rng_.below(live_.size())]);
  cancel(sequence, rng_.chance(0.3) ? FinishReason::kStop : FinishReason::kCancelled);
}

}  // namespace perigee::sim

#include "exec/cuda/gpu_memory.h"

#include <algorithm>

#include "comm/cuda/peer_choose.h"
#include "control/plan.h"
#include "exec/cuda/records.h"
#include "ops/cuda/choose.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/cuda/full/full_attention.h"

namespace perigee {
namespace {

// Not measured one by one yet: a context of CUDA 13 with our kernels, cuBLASLt's workspace and the work lists of
// attention; a graph of a decode step.
constexpr int64_t kSamplingScratchBytes = 25 << 10;  // of a place (sample_scratch_bytes()); the first is in the next
constexpr int64_t kContextBytes = int64_t{700} << 20, kGraphBytes = int64_t{4} << 20;

struct StepSizes {
  int64_t tokens, slots, logit_rows;
  KernelTraits traits;
};

// Bytes a token of one layer's attention; its temporaries live until the end of the layer.
int64_t latent_attention_bytes(const ModelConfig& c) {
  const int64_t heads = c.local_heads(), row = c.kv_lora + c.rope;
  const int64_t q = 6 * c.q_lora + 2 * heads * (c.nope + c.rope), kv = 4 * row, out = 2 * heads * c.value;
  const int64_t absorbed = 2 * heads * (row + c.kv_lora), expanded = 4 * heads * (c.value + 1);
  return q + kv + out + std::max(absorbed, expanded);
}

int64_t kda_bytes(const ModelConfig& c) {
  const KdaShape kda = c.local_kda();
  const int64_t width = kda.width();
  return 12 * width + 2 * (2 * kda.dim + kda.heads) + 8 * width + 2 * width + 4 * width;
}

// Of a gated MLP of `inter`.
int64_t mlp_bytes(int64_t inter, int64_t hidden, const StepSizes& s) {
  const bool separate = choose_separate_silu(WeightFormat::kBF16, s.tokens, s.traits);
  return 2 * inter + (separate ? 8 * inter : 0) + 4 * hidden;
}

int64_t experts_bytes(const ModelConfig& c, const StepSizes& s) {
  const int64_t pairs = s.tokens * c.top_k, first = first_hopper_pairs(c.num_experts, s.traits);
  const int64_t parts = pairs < first ? pairs : std::max((pairs + 1) / 2, first - 1);  // of 4 bytes
  const int64_t routing = s.tokens * (8 * c.top_k + 4 * c.num_experts), lists = 16 * pairs;
  const int64_t shared = c.num_shared_experts > 0 ? s.tokens * mlp_bytes(c.local_shared_inter(), c.hidden, s) : 0;
  return routing + lists + pairs * 2 * c.local_expert_inter() + 4 * parts * c.hidden + shared;
}

// Of a draft model: the first pass runs the step's tokens, the others a row a sequence; none gives memory back before
// the last.
int64_t draft_bytes(const Eagle3& draft, int64_t num_drafts, int64_t ranks, const StepSizes& s) {
  const Eagle3Config& c = draft.config();
  const int64_t hidden = c.layer.hidden, heads = c.full.heads / c.layer.ranks.size,
                kv_heads = c.full.kv_heads / c.layer.ranks.size;
  const int64_t full = c.full.dim * (4 * (heads + 2 * kv_heads) + 2 * 2 * heads);
  const int64_t token = 4 * hidden + 2 * 2 * hidden + (c.has_latents() ? latent_attention_bytes(c.layer) : full);
  const int64_t fused = 4 * hidden + (c.norms_each_tap || c.norms_all_taps ? 2 * std::ssize(c.taps) * hidden : 0);
  const StepSizes rows{.tokens = s.slots, .slots = s.slots, .logit_rows = s.slots, .traits = s.traits};
  const int64_t pass = s.slots * (mlp_bytes(c.layer.local_inter(), hidden, rows) + 4 * hidden + 4 * c.vocab / ranks);
  return s.tokens * (fused + token) + (num_drafts - 1) * s.slots * token + num_drafts * pass;
}

// The residual, the normed input of each part, hidden states for a draft, and the layer that takes most; then the
// logits, and beside them what a draft takes.
int64_t step_bytes(const RankParts& parts, const ModelConfig& c, const StepSizes& s) {
  const int64_t kda = c.num_kda_layers() > 0 ? kda_bytes(c) : 0;
  const int64_t latent = c.num_kda_layers() < c.num_layers ? latent_attention_bytes(c) : 0;
  int64_t feed_forward = s.tokens * mlp_bytes(c.local_inter(), c.hidden, s);
  if (c.num_experts > 0) feed_forward = std::max(feed_forward, experts_bytes(c, s));
  const int64_t layer = s.tokens * (std::max(kda, latent) + 4 * c.hidden + 2 * c.hidden) + feed_forward;
  const int64_t logits = s.logit_rows * (4 * c.vocab / c.ranks.size + 6 * c.hidden);
  if (!parts.draft) return s.tokens * 6 * c.hidden + std::max(layer, logits);
  const int64_t taps = 2 * std::ssize(parts.draft->config().taps) * c.hidden;
  const int64_t draft = draft_bytes(*parts.draft, parts.config.limits.num_drafts, c.ranks.size, s);
  return s.tokens * (6 * c.hidden + taps) + std::max(layer, logits + draft);
}

// Of a group of ranks that exchange data.
int64_t group_bytes(int64_t size) {
  return size > 1 ? static_cast<int64_t>(all_box_bytes(static_cast<int32_t>(size))) : 0;
}

int64_t array_bytes(const RankParts& parts, const ModelConfig& c, const StepSizes& s) {
  const int64_t blocks = parts.max_blocks(INT32_MAX), states = parts.state_pages(), ranks = c.ranks.size;
  const int64_t kept = (s.slots + ranks - 1) / ranks;  // slots that the rank samples: counts, logits as sampled
  const int64_t drafts = parts.config.limits.num_drafts, places = 1 + drafts;  // that a sequence is sampled at
  const int64_t bits = 4 * ((c.vocab + 31) / 32);
  const int64_t sampled = kept * (4 * ((c.vocab + 1) / 2) + bits + places * 4 * c.vocab);
  // Rows of logits that come here.
  const int64_t whole = ranks > 1 ? 4 * c.vocab * (places * kept + kPromptLogprobTokens) : 0;
  const int64_t history = drafts > 0 && parts.draft == nullptr ? 4 * (c.max_positions + 1) : 0;  // for prompt lookup
  const int64_t of_blocks = 1 + (parts.config.limits.dcp_size > 1 ? 1 : 0) + (parts.has_draft_tables() ? 1 : 0);
  const int64_t lists = int64_t{kMaxListed} * 8, tables = 2 * 4 * (of_blocks * blocks + states), masks = bits;
  const int64_t uploads = 2 * (blocks * static_cast<int64_t>(sizeof(AppendRecord)) + 8 * states);
  const int64_t records = static_cast<int64_t>(sizeof(SlotParams) + 2 * sizeof(StartRecord)) +
                          places * static_cast<int64_t>(sizeof(SampleResult)) + drafts * kSamplingScratchBytes;
  const int64_t scores = kPromptLogprobTokens * static_cast<int64_t>(sizeof(TokenScore));
  const bool by_head = parts.draft && !parts.draft->config().has_latents();
  const int64_t attention = by_head ? full_partial_bytes(kFullMostDim) : 0;
  const int64_t boxes = group_bytes(ranks) + group_bytes(parts.config.limits.dcp_size);
  return boxes + attention + s.slots * (lists + tables + masks + uploads + records + history) + sampled + whole +
         s.tokens * 64 + 4 * c.max_positions + scores + (states > 0 ? parts.ring_bytes() : 0);
}

// A pass of a draft has about as many kernels as a layer.
int64_t graph_bytes(const RankParts& parts, const ModelConfig& c) {
  return kGraphBytes + (parts.draft ? kGraphBytes * parts.config.limits.num_drafts / c.num_layers : 0);
}

// As DecodeGraphs has them.
int64_t num_graphs(int64_t slots) {
  const int64_t few = std::min<int64_t>(slots, 16), some = std::max<int64_t>(std::min<int64_t>(slots, 128) - 16, 0);
  return few + some / 12 + std::max<int64_t>(slots - 128, 0) / 64 + 1;
}

}  // namespace

Result<RankParts> size_gpu_parts(const RankConfig& config) {
  return size_parts(config, *make_cuda_sizes());
}

GpuWorkspace estimate_gpu_workspace(const RankParts& parts, const ModelConfig& model, int compute_capability) {
  const bool deterministic = parts.config.limits.deterministic;
  const StepSizes sizes{
      .tokens = parts.max_tokens(),
      .slots = parts.config.limits.max_sequences,
      .logit_rows = parts.max_rows_of_logits(),
      .traits = {.compute_capability = compute_capability, .deterministic = deterministic, .library = !deterministic}};
  return {.context = kContextBytes,
          .arrays = array_bytes(parts, model, sizes),
          .temporaries = step_bytes(parts, model, sizes),
          .graphs = num_graphs(sizes.slots) * graph_bytes(parts, model)};
}

}  // namespace perigee

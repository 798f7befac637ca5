#include "control/plan_codec.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace perigee {
namespace {

constexpr uint32_t kMagic = 0x46534750;  // "PGSF"

// Elements of a list, at most.
constexpr size_t kMaxRows = 1 << 16;
constexpr size_t kMaxTokens = 1 << 24;
constexpr size_t kMaxPages = 1 << 24;
constexpr size_t kMaxStatePages = 1 << 12;
constexpr size_t kMaxListedIds = 1 << 16;
constexpr size_t kMaxMaskWords = 1 << 20;
constexpr size_t kMaxTextBytes = 1 << 16;

template <typename T>
struct BitsOf {
  using type = std::make_unsigned_t<T>;
};
template <>
struct BitsOf<float> {
  using type = uint32_t;
};
template <>
struct BitsOf<bool> {
  using type = uint8_t;
};

// Writer and Reader offer the same words, so that one function for each struct serves both directions.
class Writer {
 public:
  static constexpr bool kReads = false;
  explicit Writer(std::vector<uint8_t>& out) : out_(out) {}

  template <typename T>
  void number(const char* /*field*/, const T& value) {
    const auto bits = std::bit_cast<typename BitsOf<T>::type>(value);
    for (size_t i = 0; i < sizeof(bits); ++i) out_.push_back(static_cast<uint8_t>(bits >> (8 * i)));
  }
  size_t count(const char* field, size_t size, size_t most) {
    CHECK(size <= most, field, " has ", size, " elements, ", most, " at most");
    number(field, static_cast<uint32_t>(size));
    return size;
  }
  void require(bool condition, const char* field) const { CHECK(condition, "a plan with a bad ", field); }
  void enter(const char*) {}
  void leave() {}
  bool failed() const { return false; }

 private:
  std::vector<uint8_t>& out_;
};

// The first bad field ends it: what is read after that has no meaning and takes no memory.
class Reader {
 public:
  static constexpr bool kReads = true;
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  void number(const char* field, T& value) {
    using Bits = typename BitsOf<T>::type;
    if (bytes_.size() < sizeof(Bits)) return fail(field, "the frame ends here");
    Bits bits = 0;
    for (size_t i = 0; i < sizeof(Bits); ++i) bits = static_cast<Bits>(bits | static_cast<Bits>(bytes_[i]) << (8 * i));
    bytes_ = bytes_.subspan(sizeof(Bits));
    if constexpr (std::is_same_v<T, bool>) {
      if (bits > 1) return fail(field, fmt::format("a truth value of {}", int{bits}));
      value = bits == 1;
    } else {
      value = std::bit_cast<T>(bits);
    }
  }
  // Each element takes a byte at least.
  size_t count(const char* field, size_t /*size*/, size_t most) {
    uint32_t size = 0;
    number(field, size);
    if (size > most) fail(field, fmt::format("{} elements, {} at most", size, most));
    if (size > bytes_.size()) fail(field, fmt::format("{} elements in {} bytes", size, bytes_.size()));
    return failed() ? 0 : size;
  }
  void require(bool condition, const char* field) {
    if (!condition) fail(field, "out of range");
  }
  void enter(const char* field) {
    CHECK(depth_ < path_.size());
    path_[depth_++] = field;
  }
  void leave() { --depth_; }

  void fail(const char* field, std::string why) {
    bytes_ = {};
    if (failed()) return;
    for (size_t i = 0; i < depth_; ++i) field_.append(path_[i]).append(".");
    field_.append(field);
    why_ = std::move(why);
  }
  bool failed() const { return !field_.empty(); }
  bool at_end() const { return bytes_.empty(); }
  Error error() const { return bad_input(fmt::format("a frame with a bad {}: {}", field_, why_), field_); }

 private:
  std::span<const uint8_t> bytes_;
  std::array<const char*, 8> path_{};
  size_t depth_ = 0;
  std::string field_, why_;
};

// One function for each struct. They name every member in a structured binding, so that a new one cannot be forgotten.
template <typename Io, typename List, typename Each>
void list(Io& io, const char* field, List& values, size_t most, Each each) {
  const size_t count = io.count(field, values.size(), most);
  io.enter(field);
  for (size_t i = 0; i < count && !io.failed(); ++i) {
    if constexpr (Io::kReads) values.push_back({});
    each(values[i]);
  }
  io.leave();
}

template <typename Io, typename List>
void numbers(Io& io, const char* field, List& values, size_t most) {
  list(io, field, values, most, [&](auto& value) { io.number("value", value); });
}

template <typename Io, typename Value>
void id(Io& io, const char* field, Value& value) {
  io.number(field, value.value);
}

template <typename Io, typename Value>
void placement(Io& io, const char* field, Value& value) {
  auto& [page, dcp_index] = value;
  io.enter(field);
  id(io, "page", page);
  io.number("dcp_index", dcp_index);
  io.leave();
}

template <typename Io, typename List>
void placements(Io& io, const char* field, List& values) {
  list(io, field, values, kMaxStatePages, [&](auto& value) { placement(io, "place", value); });
}

template <typename Io, typename Value>
void sampling_params(Io& io, Value& value) {
  auto& [temperature, top_k, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty, seed, logit_bias,
         max_tokens, min_tokens, stop_ids, logprobs, prompt_logprobs] = value;
  io.number("temperature", temperature);
  io.number("top_k", top_k);
  io.number("top_p", top_p);
  io.number("min_p", min_p);
  io.number("presence_penalty", presence_penalty);
  io.number("frequency_penalty", frequency_penalty);
  io.number("repetition_penalty", repetition_penalty);
  io.number("seed", seed);
  list(io, "logit_bias", logit_bias, kMaxListedIds, [&](auto& entry) {
    io.number("id", entry.first);
    io.number("bias", entry.second);
  });
  io.number("max_tokens", max_tokens);
  io.number("min_tokens", min_tokens);
  numbers(io, "stop_ids", stop_ids, kMaxListedIds);
  io.number("logprobs", logprobs);
  io.number("prompt_logprobs", prompt_logprobs);
}

// What the pointer points to; a reader makes a new one.
template <typename Io, typename Pointer, typename Each>
void pointee(Io& io, const char* field, Pointer& pointer, Each each) {
  if constexpr (Io::kReads) {
    auto value = std::make_shared<std::remove_const_t<typename Pointer::element_type>>();
    each(*value);
    pointer = std::move(value);
  } else {
    io.require(pointer != nullptr, field);
    each(*pointer);
  }
}

template <typename Io, typename Value>
void sequence_start(Io& io, Value& value) {
  auto& [slot, sequence, tokens, num_prompt_tokens, num_cached_tokens, sampling, state_pages, checkpoint] = value;
  id(io, "slot", slot);
  id(io, "sequence", sequence);
  pointee(io, "tokens", tokens, [&](auto& ids) { numbers(io, "tokens", ids, kMaxTokens); });
  io.number("num_prompt_tokens", num_prompt_tokens);
  io.number("num_cached_tokens", num_cached_tokens);
  io.enter("sampling");
  pointee(io, "sampling", sampling, [&](auto& params) { sampling_params(io, params); });
  io.leave();
  placements(io, "state_pages", state_pages);
  placements(io, "checkpoint", checkpoint);
}

template <typename Io, typename Value>
void block_append(Io& io, Value& value) {
  auto& [slot, block_index, place] = value;
  id(io, "slot", slot);
  io.number("block_index", block_index);
  placement(io, "place", place);
}

template <typename Io, typename Value>
void prefill(Io& io, Value& value) {
  auto& [tokens_offset, num_tokens, sample, prompt_logprobs] = value;
  io.number("tokens_offset", tokens_offset);
  io.number("num_tokens", num_tokens);
  io.number("sample", sample);
  io.number("prompt_logprobs", prompt_logprobs);
  io.require(num_tokens >= 1, "num_tokens");
}

template <typename Io, typename Value>
void verify(Io& io, Value& value) {
  auto& [num_drafts] = value;
  io.number("num_drafts", num_drafts);
  io.require(num_drafts >= 0 && num_drafts <= kMaxDrafts, "num_drafts");
}

// Its alternative (u8), then that.
template <typename Io, typename Value>
void row_work(Io& io, Value& value) {
  auto alternative = static_cast<uint8_t>(value.index());
  io.number("alternative", alternative);
  if constexpr (Io::kReads) {
    if (alternative == 0) value = Prefill();
    if (alternative == 1) value = Decode();
    if (alternative == 2) value = Verify();
  }
  io.require(alternative < std::variant_size_v<RowWork>, "alternative");
  if (auto* chunk = std::get_if<Prefill>(&value)) prefill(io, *chunk);
  if (auto* drafted = std::get_if<Verify>(&value)) verify(io, *drafted);
}

template <typename Io, typename Value>
void plan_row(Io& io, Value& value) {
  auto& [slot, sequence, position, work, masked] = value;
  id(io, "slot", slot);
  id(io, "sequence", sequence);
  auto& [least, most] = position;
  io.enter("position");
  io.number("least", least);
  io.number("most", most);
  io.require(least >= 0 && least <= most, "most");
  io.leave();
  io.enter("work");
  row_work(io, work);
  io.leave();
  io.number("masked", masked);
}

template <typename Io, typename Value>
void checkpoint_write(Io& io, Value& value) {
  auto& [slot, lower, upper, pages] = value;
  id(io, "slot", slot);
  io.number("lower", lower);
  io.number("upper", upper);
  io.require(value.is_valid(), "upper");
  placements(io, "pages", pages);
}

// A chunk's ids lie in the plan.
bool has_ids(const Prefill* prefill, size_t num_tokens) {
  return prefill == nullptr || (prefill->tokens_offset >= 0 && int64_t{prefill->tokens_offset} + prefill->num_tokens <=
                                                                   static_cast<int64_t>(num_tokens));
}

bool begins_with_decodes(const std::vector<PlanRow>& rows, int32_t count) {
  return count >= 0 && count <= std::ssize(rows) &&
         std::all_of(rows.begin(), rows.begin() + count, [](const PlanRow& row) { return row.prefill() == nullptr; });
}

template <typename Io, typename Value>
void content(Io& io, Value& value, const StepPlan* /*kind*/) {
  auto& [step, starts, appends, rows, tokens, checkpoints, num_decode_rows, eager] = value;
  id(io, "step", step);
  list(io, "starts", starts, kMaxRows, [&](auto& start) { sequence_start(io, start); });
  list(io, "appends", appends, kMaxPages, [&](auto& append) { block_append(io, append); });
  list(io, "rows", rows, kMaxRows, [&](auto& row) { plan_row(io, row); });
  numbers(io, "tokens", tokens, kMaxTokens);
  list(io, "checkpoints", checkpoints, kMaxPages, [&](auto& write) { checkpoint_write(io, write); });
  io.number("num_decode_rows", num_decode_rows);
  io.number("eager", eager);
  for (const PlanRow& row : rows) io.require(has_ids(row.prefill(), tokens.size()), "rows.work.tokens_offset");
  io.require(begins_with_decodes(rows, num_decode_rows), "num_decode_rows");
}

template <typename Io, typename Value>
void row_mask(Io& io, Value& value) {
  auto& [slot, words] = value;
  id(io, "slot", slot);
  numbers(io, "words", words, kMaxMaskWords);
}

template <typename Io, typename Value>
void content(Io& io, Value& value, const StepMasks* /*kind*/) {
  auto& [step, rows] = value;
  id(io, "step", step);
  list(io, "rows", rows, kMaxRows, [&](auto& row) { row_mask(io, row); });
}

template <typename Io, typename Value>
void token_logprobs(Io& io, Value& value) {
  auto& [token, logprob, rank, top] = value;
  io.number("id", token);
  io.number("logprob", logprob);
  io.number("rank", rank);
  list(io, "top", top, kMaxListedIds, [&](auto& entry) {
    io.number("id", entry.first);
    io.number("logprob", entry.second);
  });
}

template <typename Io, typename Value>
void row_result(Io& io, Value& value) {
  auto& [slot, sequence, ids, logprobs, prompt_logprobs, checkpoints, finite, num_drafts, drafts] = value;
  id(io, "slot", slot);
  id(io, "sequence", sequence);
  numbers(io, "ids", ids, RowIds::capacity());
  list(io, "logprobs", logprobs, RowIds::capacity(), [&](auto& entry) { token_logprobs(io, entry); });
  list(io, "prompt_logprobs", prompt_logprobs, kMaxTokens, [&](auto& entry) { token_logprobs(io, entry); });
  numbers(io, "checkpoints", checkpoints, kMaxPages);
  io.number("finite", finite);
  io.number("num_drafts", num_drafts);
  io.require(num_drafts >= 0 && num_drafts <= kMaxDrafts, "num_drafts");
  numbers(io, "drafts", drafts, DraftIds::capacity());
}

template <typename Io, typename Value>
void content(Io& io, Value& value, const StepResult* /*kind*/) {
  auto& [step, rows, device_lost] = value;
  id(io, "step", step);
  list(io, "rows", rows, kMaxRows, [&](auto& row) { row_result(io, row); });
  numbers(io, "device_lost", device_lost, kMaxTextBytes);
}

template <typename T>
constexpr FrameKind kKindOf = std::is_same_v<T, StepPlan>    ? FrameKind::kPlan
                              : std::is_same_v<T, StepMasks> ? FrameKind::kMasks
                                                             : FrameKind::kResult;

template <typename T>
void encode_frame(const T& value, std::vector<uint8_t>& frame) {
  frame.clear();
  Writer writer(frame);
  writer.number("magic", kMagic);
  writer.number("version", kPlanCodecVersion);
  writer.number("kind", static_cast<uint16_t>(kKindOf<T>));
  writer.number("length", uint32_t{0});
  content(writer, value, static_cast<const T*>(nullptr));
  CHECK(frame.size() <= kMaxFrameBytes, "a frame of ", frame.size(), " bytes");
  const size_t length = frame.size() - kFrameHeaderBytes;
  for (size_t i = 0; i < 4; ++i) frame[kFrameHeaderBytes - 4 + i] = static_cast<uint8_t>(length >> (8 * i));
}

template <typename T>
Result<T> decode_frame(std::span<const uint8_t> frame) {
  Reader reader(frame);
  if (frame.size() > kMaxFrameBytes)
    reader.fail("length", fmt::format("{} bytes, {} at most", frame.size(), kMaxFrameBytes));
  uint32_t magic = 0, length = 0;
  uint16_t version = 0, kind = 0;
  reader.number("magic", magic);
  reader.require(magic == kMagic, "magic");
  reader.number("version", version);
  if (version != kPlanCodecVersion)
    reader.fail("version", fmt::format("{}, this program speaks {}", version, kPlanCodecVersion));
  reader.number("kind", kind);
  reader.require(kind == static_cast<uint16_t>(kKindOf<T>), "kind");
  reader.number("length", length);
  reader.require(length == frame.size() - kFrameHeaderBytes, "length");
  T value;
  if (!reader.failed()) content(reader, value, static_cast<const T*>(nullptr));
  reader.require(reader.at_end(), "length");
  if (reader.failed()) return reader.error();
  return value;
}

}  // namespace

void encode(const StepPlan& plan, std::vector<uint8_t>& frame) {
  encode_frame(plan, frame);
}
void encode(const StepMasks& masks, std::vector<uint8_t>& frame) {
  encode_frame(masks, frame);
}
void encode(const StepResult& result, std::vector<uint8_t>& frame) {
  encode_frame(result, frame);
}

Result<StepPlan> decode_plan(std::span<const uint8_t> frame) {
  return decode_frame<StepPlan>(frame);
}
Result<StepMasks> decode_masks(std::span<const uint8_t> frame) {
  return decode_frame<StepMasks>(frame);
}
Result<StepResult> decode_result(std::span<const uint8_t> frame) {
  return decode_frame<StepResult>(frame);
}

}  // namespace perigee

#include "text/tokenizer.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "base/model_folder.h"
#include "base/utf8.h"
#include "text/pretokenizer.h"

namespace perigee {
namespace {

constexpr size_t kMaxConfigBytes = 16u << 20;
constexpr size_t kMaxSpecialBytes = 1024;

// Copies `text` without kNeutral. Looking at the tail of what is kept also catches one that a removal puts together.
std::string without_neutral(std::string_view text) {
  std::string out;
  if (text.find(kNeutral) == std::string_view::npos) return out = text;
  out.reserve(text.size());
  for (const char c : text) {
    out += c;
    if (c == kNeutral.back() && out.ends_with(kNeutral)) out.resize(out.size() - kNeutral.size());
  }
  return out;
}

// One member of added_tokens_decoder: "163586": {"content": "<|im_end|>", "special": true, …}.
Result<SpecialToken> parse_added_token(const std::string& key, const Json& value) {
  SpecialToken out{0, "", false};
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), out.id);
  if (error != std::errc() || end != key.data() + key.size() || out.id < 0)
    return bad_input(fmt::format("added_tokens_decoder: \"{}\" is not a token id", key));
  const Json* content = value.find("content");
  if (content == nullptr || !content->is_string())
    return bad_input(fmt::format("added_tokens_decoder: token {} has no string \"content\"", key));
  out.text = content->as_string();
  const Json* special = value.find("special");
  if (special != nullptr && !special->is_bool())
    return bad_input(fmt::format("added_tokens_decoder: \"special\" of token {} is not a boolean", key));
  out.special = special != nullptr && special->as_bool();
  return out;
}

Error in_file(const std::string& path, const Error& error) {
  return Error(error.code, path + ": " + error.message);
}

// All 256 specials by id, from the named ones; `first` is the id of the first.
Result<std::vector<SpecialToken>> complete_specials(std::vector<SpecialToken> named, int32_t first) {
  constexpr int32_t kNum = Tokenizer::kNumSpecials;
  std::vector<SpecialToken> out(kNum);
  for (SpecialToken& token : named) {
    if (token.id < first || token.id >= first + kNum)
      return bad_input(fmt::format("special token {} is not one of {} to {}", token.id, first, first + kNum - 1));
    if (token.text.empty() || token.text.size() > kMaxSpecialBytes)
      return bad_input(fmt::format("special token {}: its text is empty or over {} bytes", token.id, kMaxSpecialBytes));
    if (token.text.find(kNeutral) != std::string::npos)
      return bad_input(fmt::format("special token {}: its text holds U+FDD0, which marks untrusted text", token.id));
    SpecialToken& slot = out[token.id - first];
    if (!slot.text.empty()) return bad_input(fmt::format("special token {} is named twice", token.id));
    slot = std::move(token);
  }
  for (int32_t i = 0; i < kNum; ++i)
    if (out[i].text.empty()) out[i] = {first + i, fmt::format("<|reserved_token_{}|>", first + i), true};
  std::vector<std::string_view> texts;
  for (const SpecialToken& token : out) texts.push_back(token.text);
  std::sort(texts.begin(), texts.end());
  const auto twice = std::adjacent_find(texts.begin(), texts.end());
  if (twice != texts.end()) return bad_input(fmt::format("two special tokens have the text {}", *twice));
  return out;
}

}  // namespace

Result<std::vector<SpecialToken>> parse_tokenizer_config(std::string_view text) {
  ASSIGN_OR_RETURN(const Json config, parse_json(text, {.max_bytes = kMaxConfigBytes, .max_depth = 16}));
  std::vector<SpecialToken> out;
  if (!config.is_object()) return bad_input("is not a JSON object");
  const Json* added = config.find("added_tokens_decoder");
  if (added == nullptr) return out;
  if (!added->is_object()) return bad_input("\"added_tokens_decoder\" is not an object");
  for (const auto& [key, value] : added->as_object()) {
    ASSIGN_OR_RETURN(SpecialToken token, parse_added_token(key, value));
    out.push_back(std::move(token));
  }
  return out;
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::load(const std::string& dir) {
  ASSIGN_OR_RETURN(const std::string config, read_in_folder(dir, "tokenizer_config.json", kMaxConfigBytes));
  auto specials = parse_tokenizer_config(config);
  if (!specials.ok()) return in_file(dir + "/tokenizer_config.json", specials.error());
  ASSIGN_OR_RETURN(const std::string vocabulary, read_in_folder(dir, "tiktoken.model", Vocabulary::kMaxFileBytes));
  auto tokenizer = create(vocabulary, std::move(*specials));
  if (!tokenizer.ok()) return in_file(dir, tokenizer.error());
  return tokenizer;
}

Result<std::shared_ptr<const Tokenizer>> Tokenizer::create(std::string_view tiktoken_file,
                                                           std::vector<SpecialToken> specials) {
  ASSIGN_OR_RETURN(Vocabulary vocabulary, Vocabulary::parse(tiktoken_file));
  std::shared_ptr<Tokenizer> out(new Tokenizer(std::move(vocabulary)));
  ASSIGN_OR_RETURN(out->specials_, complete_specials(std::move(specials), out->vocabulary_.size()));
  std::vector<std::string_view> texts;
  out->longest_token_bytes_ = out->vocabulary_.longest();
  for (int32_t id = 0; id < out->vocabulary_.size(); ++id) out->bound_.add_token(out->vocabulary_.bytes(id));
  for (const SpecialToken& token : out->specials_) {
    texts.push_back(token.text);
    out->bound_.add_token(token.text);
    out->longest_token_bytes_ = std::max(out->longest_token_bytes_, token.text.size());
  }
  out->matcher_ = SpecialMatcher(texts);
  return std::shared_ptr<const Tokenizer>(std::move(out));
}

void Tokenizer::append_ordinary(std::string_view text, size_t max_ids, std::vector<int32_t>& out) const {
  for (size_t begin = 0; begin < text.size() && out.size() <= max_ids;) {
    const size_t end = next_piece_end(text, begin);
    vocabulary_.append_piece(text.substr(begin, end - begin), out);
    begin = end;
  }
}

namespace {

std::vector<int32_t> with_room_for(std::string_view text, size_t max_ids) {
  std::vector<int32_t> out;
  out.reserve(std::min(text.size() / 4, max_ids) + 8);
  return out;
}

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialsIn specials, size_t max_ids) const {
  std::vector<int32_t> out = with_room_for(text, max_ids);
  ReferenceCuts cuts(text, "");
  for (size_t begin = 0; begin < text.size() && out.size() <= max_ids;) {
    const size_t end = cuts.next().value_or(text.size());
    const std::string_view slice = text.substr(0, end);
    while (specials == SpecialsIn::kRecognised && out.size() <= max_ids) {
      const auto match = matcher_.find(slice, begin);
      if (!match) break;
      append_ordinary(slice.substr(begin, match->begin - begin), max_ids, out);
      if (out.size() > max_ids) return out;
      out.push_back(specials_[match->index].id);
      begin = match->begin + match->length;
    }
    append_ordinary(slice.substr(begin), max_ids, out);
    begin = end;
  }
  return out;
}

std::vector<int32_t> Tokenizer::encode_rendered(std::string_view text, size_t max_ids) const {
  std::vector<int32_t> out = with_room_for(text, max_ids);
  ReferenceCuts cuts(text, kNeutral);
  auto cut = cuts.next();
  size_t begin = 0;
  const auto ordinary_to = [&](size_t end) {
    for (; cut && *cut < end && out.size() <= max_ids; cut = cuts.next()) {
      if (*cut <= begin) continue;  // inside or at the end of a special token
      append_ordinary(without_neutral(text.substr(begin, *cut - begin)), max_ids, out);
      begin = *cut;
    }
    append_ordinary(without_neutral(text.substr(begin, end - begin)), max_ids, out);
    begin = end;
  };
  for (size_t from = 0; out.size() <= max_ids;) {
    const auto match = matcher_.find(text, from);
    if (!match) break;
    from = match->begin + match->length;
    const bool one_character = match->length == utf8_at(text, match->begin).length;
    if (one_character && text.substr(from).starts_with(kNeutral)) continue;  // untrusted: it had no room for one inside
    ordinary_to(match->begin);
    if (out.size() > max_ids) return out;
    out.push_back(specials_[match->index].id);
    begin = from;
  }
  ordinary_to(text.size());
  return out;
}

std::string Tokenizer::neutralise(std::string_view untrusted) const {
  const std::string text = without_neutral(untrusted);
  std::string out;
  out.reserve(text.size());
  for (size_t pos = 0; pos < text.size(); ++pos) {
    out += text[pos];
    if (!matcher_.can_begin(text[pos])) continue;
    if (!matcher_.match_at(text, pos) && !matcher_.could_complete(text, pos)) continue;
    const size_t more = utf8_at(text, pos).length - size_t{1};
    out.append(text, pos + 1, more).append(kNeutral);
    pos += more;
  }
  return out;
}

std::string_view Tokenizer::bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return id < vocabulary_.size() ? vocabulary_.bytes(id) : specials_[id - vocabulary_.size()].text;
}

std::optional<int32_t> Tokenizer::ordinary_id(std::string_view bytes) const {
  const int32_t id = vocabulary_.find(bytes);
  return id >= 0 ? std::optional(id) : std::nullopt;
}

std::optional<int32_t> Tokenizer::special_id(std::string_view text) const {
  const auto match = matcher_.match_at(text, 0);
  if (!match || match->length != text.size()) return std::nullopt;
  return specials_[match->index].id;
}

SpecialMatcher::SpecialMatcher(const std::vector<std::string_view>& strings) {
  for (size_t i = 0; i < strings.size(); ++i) {
    sorted_.push_back({std::string(strings[i]), static_cast<int32_t>(i)});
    first_bytes_[static_cast<uint8_t>(strings[i][0])] = true;
  }
  std::sort(sorted_.begin(), sorted_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
}

SpecialMatcher::Range SpecialMatcher::narrow(Range range, size_t depth, char byte) const {
  // An entry that ends at `depth` sorts first and compares as below every byte.
  const auto key = [depth](const Entry& e) { return depth < e.text.size() ? static_cast<uint8_t>(e.text[depth]) : -1; };
  const int want = static_cast<uint8_t>(byte);
  const auto begin = sorted_.begin() + static_cast<ptrdiff_t>(range.low);
  const auto end = sorted_.begin() + static_cast<ptrdiff_t>(range.high);
  const auto low = std::partition_point(begin, end, [&](const Entry& e) { return key(e) < want; });
  const auto high = std::partition_point(low, end, [&](const Entry& e) { return key(e) == want; });
  return {static_cast<size_t>(low - sorted_.begin()), static_cast<size_t>(high - sorted_.begin())};
}

std::optional<SpecialMatcher::Match> SpecialMatcher::match_at(std::string_view text, size_t pos) const {
  std::optional<Match> longest;
  Range range{0, sorted_.size()};
  for (size_t depth = 0; pos + depth < text.size(); ++depth) {
    range = narrow(range, depth, text[pos + depth]);
    if (range.low == range.high) break;
    const Entry& first = sorted_[range.low];
    if (first.text.size() == depth + 1) longest = Match{pos, depth + 1, first.index};
  }
  return longest;
}

std::optional<SpecialMatcher::Match> SpecialMatcher::find(std::string_view text, size_t from) const {
  for (size_t pos = from; pos < text.size(); ++pos) {
    if (!can_begin(text[pos])) continue;
    if (auto match = match_at(text, pos)) return match;
  }
  return std::nullopt;
}

bool SpecialMatcher::could_complete(std::string_view text, size_t pos) const {
  Range range{0, sorted_.size()};
  for (size_t i = pos; i < text.size() && range.low < range.high; ++i) range = narrow(range, i - pos, text[i]);
  return range.low < range.high;
}

void TokenBound::add_token(std::string_view bytes) {
  if (bytes.empty()) return;
  const auto share = static_cast<uint32_t>(kOneToken / bytes.size());
  for (const char byte : bytes) {
    uint32_t& weight = weights_[static_cast<uint8_t>(byte)];
    weight = std::min(weight, share);
  }
}

uint64_t TokenBound::weight(std::string_view text) const {
  uint64_t sums[4] = {};  // four chains of additions, since one would wait for each look-up
  size_t i = 0;
  for (; i + 4 <= text.size(); i += 4)
    for (size_t j = 0; j < 4; ++j) sums[j] += weight(text[i + j]);
  for (; i < text.size(); ++i) sums[0] += weight(text[i]);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

bool TokenBound::is_over(std::string_view text, uint64_t max_tokens) const {
  constexpr size_t kPiece = 4096;
  const uint64_t limit = max_tokens * kOneToken;
  uint64_t sum = 0;
  while (!text.empty() && sum <= limit) {
    const std::string_view piece = text.substr(0, kPiece);
    sum += weight(piece);
    text.remove_prefix(piece.size());
  }
  return sum > limit;
}

}  // namespace perigee

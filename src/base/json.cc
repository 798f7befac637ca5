#include "base/json.h"

#include <fmt/core.h>

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>

#include "base/utf8.h"

namespace perigee {
namespace {

// Receives Boost.JSON's events and builds a Json under the caps. Boost makes the handler itself, so limits come later.
class Builder {
 public:
  static constexpr size_t max_object_size = SIZE_MAX;
  static constexpr size_t max_array_size = SIZE_MAX;
  static constexpr size_t max_key_size = SIZE_MAX;
  static constexpr size_t max_string_size = SIZE_MAX;
  static constexpr size_t kMaxNumberBytes = 1024;

  using error_code = boost::json::error_code;
  using string_view = boost::json::string_view;

  void set_limits(const JsonLimits& limits) { limits_ = limits; }

  bool on_document_begin(error_code&) { return true; }
  bool on_document_end(error_code&) { return true; }
  bool on_object_begin(error_code& ec) { return push(Json(Json::Object{}), ec); }
  bool on_array_begin(error_code& ec) { return push(Json(Json::Array{}), ec); }
  bool on_object_end(size_t, error_code& ec) {
    const std::string* twice = duplicate_key(stack_.back().value.as_object());
    if (twice != nullptr) return refuse(fmt::format("the key \"{}\" twice in one object", excerpt(*twice, 64)), ec);
    return pop(ec);
  }
  bool on_array_end(size_t, error_code& ec) { return pop(ec); }
  bool on_key_part(string_view part, size_t, error_code& ec) {
    return append(part, limits_.max_key_bytes, "bytes in one key", ec);
  }
  bool on_key(string_view part, size_t, error_code& ec) {
    if (!append(part, limits_.max_key_bytes, "bytes in one key", ec)) return false;
    Frame& frame = stack_.back();
    if (frame.value.as_object().size() >= limits_.max_members)
      return over(limits_.max_members, "members in one object", ec);
    frame.key = std::move(text_);
    text_.clear();
    return true;
  }
  bool on_string_part(string_view part, size_t, error_code& ec) {
    return append(part, limits_.max_string_bytes, "bytes in one string", ec);
  }
  bool on_string(string_view part, size_t, error_code& ec) {
    if (!append(part, limits_.max_string_bytes, "bytes in one string", ec)) return false;
    const bool added = add(Json(std::move(text_)), ec);
    text_.clear();
    return added;
  }
  bool on_number_part(string_view part, error_code& ec) {
    return append(part, kMaxNumberBytes, "bytes in one number", ec);
  }
  bool on_int64(int64_t value, string_view, error_code& ec) {
    text_.clear();
    if (stack_.empty() || !stack_.back().value.is_array()) return add(Json(value), ec);
    Json::Array& array = stack_.back().value.as_array();  // the way of token ids
    if (!count(kNumberCost, ec) || !has_room(array, ec)) return false;
    array.emplace_back(value);
    return true;
  }
  bool on_uint64(uint64_t value, string_view, error_code& ec) { return add_number(Json(value), ec); }
  // Boost.JSON's own value can be one step off: the text decides.
  bool on_double(double, string_view part, error_code& ec) {
    if (!append(part, kMaxNumberBytes, "bytes in one number", ec)) return false;
    return add_number(Json::number(std::move(text_)), ec);
  }
  bool on_bool(bool value, error_code& ec) { return add(Json(value), ec); }
  bool on_null(error_code& ec) { return add(Json(), ec); }
  bool on_comment_part(string_view, error_code&) { return true; }
  bool on_comment(string_view, error_code&) { return true; }

  Json take() { return std::move(root_); }
  const std::string& refusal() const { return refusal_; }  // "": the text itself is wrong, or nothing is

 private:
  struct Frame {
    Json value;
    std::string key;
  };

  // A key that the object has twice, or nullptr.
  const std::string* duplicate_key(const Json::Object& members) {
    constexpr size_t kFew = 8;  // up to here comparing each with each is faster
    if (members.size() > kFew) return duplicate_of_many(members);
    for (size_t i = 1; i < members.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (members[i].first == members[j].first) return &members[i].first;
    return nullptr;
  }
  // Sorted by hash and then by text, so that no choice of keys makes it slow.
  const std::string* duplicate_of_many(const Json::Object& members) {
    keys_.clear();
    for (const Json::Member& member : members)
      keys_.emplace_back(std::hash<std::string>()(member.first), &member.first);
    const auto less = [](const HashedKey& a, const HashedKey& b) {
      return a.first != b.first ? a.first < b.first : *a.second < *b.second;
    };
    std::sort(keys_.begin(), keys_.end(), less);
    const auto same = [](const HashedKey& a, const HashedKey& b) {
      return a.first == b.first && *a.second == *b.second;
    };
    const auto found = std::adjacent_find(keys_.begin(), keys_.end(), same);
    return found == keys_.end() ? nullptr : found->second;
  }
  bool refuse(std::string what, error_code& ec) {
    refusal_ = std::move(what);
    ec = boost::json::error::syntax;
    return false;
  }
  bool over(size_t limit, const char* what, error_code& ec) {
    return refuse(fmt::format("more than {} {}", limit, what), ec);
  }
  bool append(string_view part, size_t limit, const char* what, error_code& ec) {
    if (part.size() > limit || text_.size() > limit - part.size()) return over(limit, what, ec);
    text_.append(part.data(), part.size());
    return true;
  }
  // Token ids are many and cheap; everything else takes several times the time and memory.
  static constexpr size_t kNumberCost = 1, kCost = 8;
  bool count(size_t cost, error_code& ec) {
    spent_ += cost;
    if (spent_ / kCost + (spent_ % kCost != 0) <= limits_.max_values) return true;
    return over(limits_.max_values, "values (eight numbers of an array count as one)", ec);
  }
  bool has_room(const Json::Array& array, error_code& ec) {
    return array.size() < limits_.max_elements || over(limits_.max_elements, "elements in one array", ec);
  }
  bool push(Json&& value, error_code& ec) {
    if (!count(kCost, ec)) return false;
    stack_.push_back({std::move(value), ""});
    return true;
  }
  bool pop(error_code& ec) {
    Json done = std::move(stack_.back().value);
    stack_.pop_back();
    return place(std::move(done), ec);
  }
  bool add_number(Json&& value, error_code& ec) {
    text_.clear();
    return add(std::move(value), ec);
  }
  bool add(Json&& value, error_code& ec) { return count(kCost, ec) && place(std::move(value), ec); }
  bool place(Json&& value, error_code& ec) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (Frame& frame = stack_.back(); frame.value.is_array()) {
      if (!has_room(frame.value.as_array(), ec)) return false;
      frame.value.as_array().push_back(std::move(value));
    } else {
      frame.value.as_object().emplace_back(std::move(frame.key), std::move(value));
    }
    return true;
  }

  using HashedKey = std::pair<size_t, const std::string*>;

  JsonLimits limits_;
  std::vector<Frame> stack_;
  std::vector<HashedKey> keys_;  // scratch
  std::string text_;
  std::string refusal_;
  size_t spent_ = 0;  // of max_values * kCost
  Json root_;
};

void dump(const Json& value, JsonStyle style, std::string& out) {
  const char* comma = style == JsonStyle::kCompact ? "," : ", ";
  const char* colon = style == JsonStyle::kCompact ? ":" : ": ";
  if (value.is_null()) {
    out += "null";
  } else if (value.is_bool()) {
    out += value.as_bool() ? "true" : "false";
  } else if (value.is_int()) {
    out += std::to_string(value.as_int());
  } else if (value.digits() != nullptr) {
    out += *value.digits();
  } else if (value.is_double()) {
    out += format_double(value.as_double());
  } else if (value.is_string()) {
    append_json_string(out, value.as_string());
  } else if (value.is_array()) {
    out += '[';
    bool first = true;
    for (const Json& item : value.as_array()) {
      if (!std::exchange(first, false)) out += comma;
      dump(item, style, out);
    }
    out += ']';
  } else {
    out += '{';
    bool first = true;
    for (const Json::Member& member : value.as_object()) {
      if (!std::exchange(first, false)) out += comma;
      append_json_string(out, member.first);
      out += colon;
      dump(member.second, style, out);
    }
    out += '}';
  }
}

}  // namespace

Json::Json(uint64_t value) {
  if (value <= static_cast<uint64_t>(INT64_MAX)) {
    value_ = static_cast<int64_t>(value);
  } else {
    value_ = Digits{std::to_string(value)};
  }
}

namespace {

// Whether the nearest double has all that `text` says: at most 17 digits, neither overflow nor underflow.
bool fits_double(std::string_view text, double value) {
  const std::string_view mantissa = text.substr(0, text.find_first_of("eE"));
  const size_t first = mantissa.find_first_of("123456789");
  if (first == std::string_view::npos) return true;
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto count = std::count_if(mantissa.begin() + static_cast<ptrdiff_t>(first), mantissa.end(), is_digit);
  return count <= std::numeric_limits<double>::max_digits10 && std::isfinite(value) && value != 0;
}

}  // namespace

Json Json::number(std::string text) {
  const char* end = text.data() + text.size();
  Json out;
  if (int64_t whole = 0; std::from_chars(text.data(), end, whole) == std::from_chars_result{end, std::errc()})
    return Json(whole);
  double nearest = 0;
  const bool in_range = std::from_chars(text.data(), end, nearest).ec == std::errc();
  const bool is_whole = text.find_first_of(".eE") == std::string::npos;
  if (in_range && !is_whole && fits_double(text, nearest)) return Json(nearest);
  out.value_ = Digits{std::move(text)};
  return out;
}

const std::string* Json::digits() const {
  const Digits* kept = std::get_if<Digits>(&value_);
  return kept == nullptr ? nullptr : &kept->text;
}

double Json::as_double() const {
  if (is_int()) return static_cast<double>(as_int());
  if (const std::string* text = digits()) return std::strtod(text->c_str(), nullptr);  // infinite beyond the range
  return std::get<double>(value_);
}

const char* Json::type_name() const {
  static constexpr const char* kNames[] = {"null",   "boolean", "number", "number",
                                           "number", "string",  "array",  "object"};
  return kNames[value_.index()];
}

const Json* Json::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  for (const Member& member : as_object())
    if (member.first == key) return &member.second;
  return nullptr;
}

Json* Json::find(std::string_view key) {
  return const_cast<Json*>(std::as_const(*this).find(key));
}

Json& Json::set(std::string_view key, Json value) {
  if (is_null()) value_ = Object{};
  if (Json* old = find(key)) {
    *old = std::move(value);
    return *old;
  }
  as_object().emplace_back(std::string(key), std::move(value));
  return as_object().back().second;
}

namespace {

// What is wrong where `rest` begins.
std::string fault(const boost::json::error_code& ec, std::string_view rest, const JsonLimits& limits) {
  if (!ec) return "it ends too early";
  if (ec == boost::json::error::too_deep) return fmt::format("more than {} levels of nesting", limits.max_depth);
  if (ec == boost::json::error::syntax && !rest.empty() && static_cast<unsigned char>(rest[0]) >= 0x80)
    return "a byte that is no ASCII, outside a string or not valid UTF-8 in it";
  return ec.message();
}

}  // namespace

namespace {

// The code unit of the escape \uXXXX that begins at text[at]; nothing for anything else.
std::optional<uint32_t> escaped_unit(std::string_view text, size_t at) {
  if (text.substr(at, 2) != "\\u" || text.size() < at + 6) return std::nullopt;
  uint32_t unit = 0;
  const char* end = text.data() + at + 6;
  if (std::from_chars(text.data() + at + 2, end, unit, 16).ptr != end) return std::nullopt;
  return unit;
}

// A part of the text for the parser, which ends between two escapes, with \ufffd for each escaped surrogate without its
// other half: of the same size, so that offsets stay.
struct Chunk {
  size_t end;
  std::optional<std::string> repaired;
};

Chunk next_chunk(std::string_view text, size_t begin) {
  constexpr size_t kChunkBytes = 64u << 10;
  const size_t goal = std::min(text.size(), begin + kChunkBytes);
  Chunk chunk{begin, std::nullopt};
  const std::string_view looked_at = text.substr(0, goal);  // not beyond: the rest has its own chunks
  for (size_t at = looked_at.find('\\', begin); at < goal; at = looked_at.find('\\', chunk.end)) {
    const auto unit = escaped_unit(text, at);
    const bool surrogate = unit && (*unit & 0xF800) == 0xD800;
    const bool paired = surrogate && *unit < 0xDC00 && (escaped_unit(text, at + 6).value_or(0) & 0xFC00) == 0xDC00;
    chunk.end = std::min(text.size(), at + (paired ? 12 : surrogate ? 6 : 2));
    if (!surrogate || paired) continue;
    if (!chunk.repaired) chunk.repaired.emplace(text.substr(begin, kChunkBytes + 16));
    chunk.repaired->replace(at - begin + 2, 4, "fffd");
  }
  chunk.end = std::max(chunk.end, goal);
  if (chunk.repaired) chunk.repaired->resize(chunk.end - begin);
  return chunk;
}

}  // namespace

Result<Json> parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes)
    return Error(Code::kTooLarge,
                 fmt::format("JSON of {} bytes is over the limit of {}", text.size(), limits.max_bytes));
  boost::json::parse_options options;
  options.max_depth = limits.max_depth;
  boost::json::basic_parser<Builder> parser(options);
  parser.handler().set_limits(limits);
  boost::json::error_code ec;
  size_t used = 0;
  do {
    const Chunk chunk = next_chunk(text, used);
    const std::string_view part = chunk.repaired ? *chunk.repaired : text.substr(used, chunk.end - used);
    used += parser.write_some(chunk.end < text.size(), part.data(), part.size(), ec);
  } while (!ec && !parser.done() && used < text.size());
  if (!ec && parser.done()) {
    const size_t rest = text.find_first_not_of(" \t\r\n", used);
    if (rest != std::string_view::npos) return bad_input(fmt::format("JSON has extra characters at byte {}", rest));
    return parser.handler().take();
  }
  if (const std::string& refusal = parser.handler().refusal(); !refusal.empty())
    return bad_input(fmt::format("JSON has {} (at byte {})", refusal, used));
  return bad_input(fmt::format("invalid JSON at byte {}: {}", used, fault(ec, text.substr(used), limits)));
}

std::string format_double(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  // Python's repr switches to exponents outside [1e-4, 1e16).
  const double magnitude = std::fabs(value);
  const bool fixed = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value,
                                 fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(buffer, end.ptr);
  if (fixed && out.find('.') == std::string::npos) out += ".0";
  return out;
}

void append_json_string(std::string& out, std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += "\\u00";
          out += kHex[c >> 4];
          out += kHex[c & 15];
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

std::string dump_json(const Json& value, JsonStyle style) {
  std::string out;
  dump(value, style, out);
  return out;
}

}  // namespace perigee

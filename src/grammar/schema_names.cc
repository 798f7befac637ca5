#include "grammar/schema_names.h"

#include <algorithm>
#include <cctype>
#include <vector>

namespace perigee {
namespace {

// One token of a JSON pointer without its escapes.
std::string unescaped(std::string_view token) {
  std::string out;
  for (size_t i = 0; i < token.size(); ++i) {
    if (token[i] == '~' && i + 1 < token.size() && (token[i + 1] == '0' || token[i + 1] == '1')) {
      out += token[++i] == '0' ? '~' : '/';
    } else if (token[i] == '%' && i + 2 < token.size()) {
      out += static_cast<char>(std::stoi("0" + std::string(token.substr(i + 1, 2)), nullptr, 16));
      i += 2;
    } else {
      out += token[i];
    }
  }
  return out;
}

const Json* at_pointer(const Json* at, std::string_view pointer) {
  while (at != nullptr && !pointer.empty()) {
    pointer.remove_prefix(1);
    const size_t end = std::min(pointer.find('/'), pointer.size());
    const std::string token = unescaped(pointer.substr(0, end));
    pointer.remove_prefix(end);
    const Json* next = at->find(token);
    if (next == nullptr && at->is_array() && !token.empty() && token.size() < 6 &&
        token.find_first_not_of("0123456789") == std::string::npos) {
      const size_t index = static_cast<size_t>(std::stoi(token));
      if (index < at->as_array().size()) next = &at->as_array()[index];
    }
    at = next;
  }
  return at;
}

std::string_view without_fragment(std::string_view uri) {
  return uri.substr(0, uri.find('#'));
}

// "http:" and the like; empty without one.
std::string_view scheme_of(std::string_view uri) {
  const size_t colon = uri.find(':');
  const auto is_name = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '+' || c == '-' || c == '.';
  };
  if (colon == std::string_view::npos || colon == 0 || std::isalpha(static_cast<unsigned char>(uri[0])) == 0 ||
      !std::all_of(uri.begin(), uri.begin() + static_cast<std::ptrdiff_t>(colon), is_name))
    return {};
  return uri.substr(0, colon + 1);
}

// A path without its . and .. segments.
std::string plain_path(std::string_view path) {
  std::vector<std::string_view> parts;
  const bool rooted = path.starts_with('/');
  for (size_t at = rooted ? 1 : 0; at <= path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string_view part = path.substr(at, end - at);
    const bool dots = part == "." || part == "..";
    if (part == ".." && !parts.empty()) parts.pop_back();
    if (!dots) parts.push_back(part);
    if (dots && end == path.size()) parts.emplace_back();  // a folder: its slash stays
    at = end + 1;
  }
  std::string out = rooted ? "/" : "";
  for (size_t i = 0; i < parts.size(); ++i) out.append(i > 0 ? "/" : "").append(parts[i]);
  return out;
}

// Keywords whose members are named by the client, and those whose values are not schemas.
constexpr const char* kOfNames[] = {"properties",  "patternProperties", "$defs",
                                    "definitions", "dependentSchemas",  "dependencies"};
constexpr const char* kOfData[] = {"enum", "const", "default", "examples"};

template <size_t N>
bool is_one_of(const std::string& key, const char* const (&all)[N]) {
  return std::any_of(std::begin(all), std::end(all), [&](const char* each) { return key == each; });
}

}  // namespace

std::string resolved_uri(std::string_view base, std::string_view ref) {
  if (ref.empty()) return std::string(base);
  if (!scheme_of(ref).empty()) return std::string(ref);
  const std::string_view scheme = scheme_of(base);
  if (ref.starts_with("//")) return std::string(scheme).append(ref);
  std::string_view rest = base.substr(scheme.size());
  const size_t path_at = rest.starts_with("//") ? std::min(rest.find('/', 2), rest.size()) : 0;
  const std::string_view authority = rest.substr(0, path_at);
  rest = rest.substr(path_at, rest.find('?', path_at) - path_at);
  std::string path(ref);
  if (!ref.starts_with('/')) {
    const std::string_view folder = rest.substr(0, rest.rfind('/') + 1);
    path = std::string(folder.empty() && !authority.empty() ? "/" : folder).append(ref);
  }
  return std::string(scheme).append(authority).append(plain_path(path));
}

SchemaNames::SchemaNames(const Json& root) : root_(root) {
  const Json* id = root.find("$id");
  if (id != nullptr && id->is_string()) base_ = resolved_uri("", without_fragment(id->as_string()));
  add(root, "", false);
}

void SchemaNames::add(const Json& in, const std::string& outside, bool of_names) {
  if (in.is_array())
    for (const Json& each : in.as_array()) add(each, outside, false);
  if (!in.is_object()) return;
  const auto text_of = [&](const char* key) {
    const Json* value = of_names ? nullptr : in.find(key);
    return value != nullptr && value->is_string() ? std::string_view(value->as_string()) : std::string_view();
  };
  const std::string_view id = text_of("$id");
  const bool has_uri = !without_fragment(id).empty();
  const std::string own = has_uri ? resolved_uri(outside, without_fragment(id)) : std::string();
  const std::string& base = has_uri ? own : outside;
  constexpr size_t kMostBytes = 1024;  // each name has it
  if (base.size() > kMostBytes) return;
  if (has_uri) named_.emplace(base, &in);
  if (id.starts_with('#')) named_.emplace(base + std::string(id), &in);  // as older drafts spell an $anchor
  for (const char* key : {"$anchor", "$dynamicAnchor"})
    if (const std::string_view anchor = text_of(key); !anchor.empty())
      named_.emplace(base + "#" + std::string(anchor), &in);
  for (const auto& [key, value] : in.as_object())
    if (of_names || !is_one_of(key, kOfData)) add(value, base, !of_names && is_one_of(key, kOfNames));
}

const Json* SchemaNames::find(std::string_view ref) const {
  const std::string uri = resolved_uri(base_, without_fragment(ref));
  const std::string_view fragment = ref.substr(std::min(without_fragment(ref).size() + 1, ref.size()));
  const bool is_anchor = !fragment.empty() && !fragment.starts_with('/');
  if (!is_anchor && uri == base_) return at_pointer(&root_, fragment);
  const auto known = named_.find(is_anchor ? uri + "#" + std::string(fragment) : uri);
  if (known == named_.end()) return nullptr;
  return is_anchor ? known->second : at_pointer(known->second, fragment);
}

}  // namespace perigee

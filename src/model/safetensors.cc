#include "model/safetensors.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/json.h"
#include "base/model_folder.h"

namespace perigee {
namespace {

constexpr SafetensorsType kTypes[] = {
    {"F32", 4},  {"BF16", 2}, {"F16", 2},     {"F8_E4M3", 1}, {"I32", 4}, {"I64", 8}, {"U8", 1},  {"I8", 1},
    {"BOOL", 1}, {"F64", 8},  {"F8_E5M2", 1}, {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"U32", 4}, {"U64", 8}};
constexpr size_t kMaxRank = 8;
constexpr int64_t kMaxDimension = int64_t{1} << 40;
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxIndexBytes = 100'000'000;
constexpr size_t kMaxFiles = 10'000;

std::string printable(std::string_view text) {
  std::string out(text.substr(0, 200));
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  return out;
}

Error tensor_error(std::string_view name, const std::string& what) {
  return bad_input(fmt::format("tensor {}: {}", printable(name), what));
}

Result<const SafetensorsType*> read_type(std::string_view name, const Json* value) {
  if (value == nullptr || !value->is_string()) return tensor_error(name, "dtype: expected a string");
  for (const SafetensorsType& type : kTypes)
    if (value->as_string() == type.name) return &type;
  return tensor_error(name, fmt::format("dtype: found unknown {}", printable(value->as_string())));
}

Result<std::vector<int64_t>> read_shape(std::string_view name, const Json* value) {
  if (value == nullptr || !value->is_array()) return tensor_error(name, "shape: expected an array");
  const Json::Array& dims = value->as_array();
  if (dims.size() > kMaxRank)
    return tensor_error(name, fmt::format("shape: expected at most {} dimensions, found {}", kMaxRank, dims.size()));
  std::vector<int64_t> shape;
  for (const Json& dim : dims) {
    if (!dim.is_int() || dim.as_int() < 0 || dim.as_int() > kMaxDimension)
      return tensor_error(name, "shape: expected dimensions in [0, 2^40], found " + dump_json(dim).substr(0, 100));
    shape.push_back(dim.as_int());
  }
  return shape;
}

// Reads data_offsets and checks them against shape and type.
Status read_offsets(const Json* value, SafetensorsEntry& entry) {
  if (value == nullptr || !value->is_array() || value->as_array().size() != 2)
    return tensor_error(entry.name, "data_offsets: expected two integers");
  for (const Json& offset : value->as_array())
    if (!offset.is_int() || offset.as_int() < 0)
      return tensor_error(entry.name,
                          "data_offsets: expected integers >= 0, found " + dump_json(offset).substr(0, 100));
  entry.begin = static_cast<uint64_t>(value->as_array()[0].as_int());
  entry.end = static_cast<uint64_t>(value->as_array()[1].as_int());
  if (entry.begin > entry.end)
    return tensor_error(entry.name,
                        fmt::format("data_offsets: expected begin <= end, found [{}, {}]", entry.begin, entry.end));
  uint64_t bytes = static_cast<uint64_t>(entry.type->bytes);
  for (const int64_t dim : entry.shape)
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes))
      return tensor_error(entry.name, "shape " + shape_text(entry.shape) + ": its size is over 2^64 bytes");
  if (bytes != entry.end - entry.begin)
    return tensor_error(entry.name, fmt::format("expected {} bytes for {} {}, found {}", bytes, entry.type->name,
                                                shape_text(entry.shape), entry.end - entry.begin));
  return {};
}

Result<SafetensorsEntry> read_entry(const Json::Member& member) {
  SafetensorsEntry entry{.name = member.first, .type = nullptr, .shape = {}};
  if (entry.name.empty() || entry.name.size() > kMaxNameBytes)
    return tensor_error(entry.name, fmt::format("expected a name of 1 to {} bytes", kMaxNameBytes));
  if (!member.second.is_object()) return tensor_error(entry.name, "expected an object");
  for (const Json::Member& field : member.second.as_object())
    if (field.first != "dtype" && field.first != "shape" && field.first != "data_offsets")
      return tensor_error(entry.name, "unknown field " + printable(field.first));
  ASSIGN_OR_RETURN(entry.type, read_type(entry.name, member.second.find("dtype")));
  ASSIGN_OR_RETURN(entry.shape, read_shape(entry.name, member.second.find("shape")));
  RETURN_IF_ERROR(read_offsets(member.second.find("data_offsets"), entry));
  return entry;
}

Status check_metadata(const Json& metadata) {
  if (!metadata.is_object()) return bad_input("__metadata__: expected an object");
  for (const Json::Member& member : metadata.as_object())
    if (!member.second.is_string()) return bad_input("__metadata__: expected strings only");
  return {};
}

// Sorts by place and checks that the entries cover [0, data_bytes) exactly.
Status check_cover(uint64_t data_bytes, std::vector<SafetensorsEntry>& entries) {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != at)
      return tensor_error(entry.name, fmt::format("expected to begin at byte {}, found {}{}", at, entry.begin,
                                                  entry.begin < at ? ": tensors overlap" : ": a hole between tensors"));
    at = entry.end;
  }
  if (at > data_bytes)
    return bad_input(fmt::format(
        "the file is truncated: its header names {} bytes of tensors, {} are there, {} are missing: fetch it again", at,
        data_bytes, at - data_bytes));
  if (at != data_bytes) return bad_input(fmt::format("expected {} bytes of data, found {}", at, data_bytes));
  return {};
}

}  // namespace

std::string shape_text(std::span<const int64_t> shape) {
  std::string out = "[";
  for (const int64_t dim : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(dim);
  return out + "]";
}

std::string MappedTensor::description() const {
  return fmt::format("{} {}", type->name, shape_text(shape));
}

Result<SafetensorsHeader> parse_safetensors(std::span<const uint8_t> file) {
  uint64_t length = 0;
  if (file.size() < sizeof(length))
    return bad_input(fmt::format("expected at least 8 bytes of header length, found {} bytes", file.size()));
  std::memcpy(&length, file.data(), sizeof(length));  // little-endian, as the machine is
  const uint64_t rest = file.size() - sizeof(length);
  if (length > kMaxSafetensorsHeader)
    return bad_input(fmt::format("header length: expected at most {}, found {}", kMaxSafetensorsHeader, length));
  if (length > rest)
    return bad_input(
        fmt::format("the file is truncated: its header has {} bytes, {} are there, {} are missing, and every tensor: "
                    "fetch it again",
                    length, rest, length - rest));
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + sizeof(length), length);
  Result<Json> json = parse_json(text, {.max_bytes = kMaxSafetensorsHeader, .max_depth = 16});
  if (!json.ok()) return bad_input("header: " + json.error().message);
  if (!json->is_object()) return bad_input(fmt::format("header: expected an object, found {}", json->type_name()));
  SafetensorsHeader header;
  header.data_begin = sizeof(length) + length;
  for (const Json::Member& member : json->as_object()) {
    if (member.first == "__metadata__") {
      RETURN_IF_ERROR(check_metadata(member.second));
      continue;
    }
    ASSIGN_OR_RETURN(SafetensorsEntry entry, read_entry(member));
    header.entries.push_back(std::move(entry));
  }
  RETURN_IF_ERROR(check_cover(rest - length, header.entries));
  return header;
}

const MappedTensor* WeightFiles::find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

Status WeightFiles::add_file(const std::string& name) {
  ASSIGN_OR_RETURN(const std::string path, resolve_in_folder(folder_, name));
  ASSIGN_OR_RETURN(MappedFile map, MappedFile::open(path));
  const std::span<const uint8_t> bytes = map.bytes();
  Result<SafetensorsHeader> header = parse_safetensors(bytes);
  if (!header.ok()) return Error(header.error().code, path + ": " + header.error().message);
  const uint32_t file = static_cast<uint32_t>(files_.size());
  files_.push_back(name);
  maps_.push_back(std::move(map));
  for (SafetensorsEntry& entry : header->entries) {
    const auto data = bytes.subspan(header->data_begin + entry.begin, entry.end - entry.begin);
    const auto [it, added] = tensors_.try_emplace(
        entry.name, MappedTensor{.type = entry.type, .shape = std::move(entry.shape), .data = data, .file = file});
    if (!added)
      return bad_input(
          fmt::format("{}: tensor {} is also in {}", path, printable(entry.name), files_[it->second.file]));
  }
  return {};
}

namespace {

Result<std::map<std::string, std::string>> read_weight_map(const std::string& folder, const std::string& name) {
  ASSIGN_OR_RETURN(const std::string text, read_in_folder(folder, name, kMaxIndexBytes));
  const std::string path = fmt::format("{}/{}", folder, name);
  Result<Json> json = parse_json(text, {.max_bytes = kMaxIndexBytes, .max_depth = 16});
  if (!json.ok()) return Error(json.error().code, path + ": " + json.error().message);
  const Json* map = json->find("weight_map");
  if (map == nullptr || !map->is_object() || map->as_object().empty())
    return bad_input(path + ": weight_map: expected an object with tensors");
  std::map<std::string, std::string> out;
  for (const Json::Member& member : map->as_object()) {
    if (!member.second.is_string())
      return bad_input(fmt::format("{}: weight_map: {}: expected a file name, found {}", path, printable(member.first),
                                   member.second.type_name()));
    const std::string& file = member.second.as_string();
    if (!file.ends_with(".safetensors"))
      return bad_input(fmt::format("{}: weight_map: {}: expected a *.safetensors file, found {}", path,
                                   printable(member.first), printable(file)));
    out.emplace(member.first, file);
  }
  return out;
}

}  // namespace

Status WeightFiles::check_index(const std::map<std::string, std::string>& weight_map) const {
  for (const auto& [name, file] : weight_map) {
    const MappedTensor* tensor = find(name);
    if (tensor == nullptr || files_[tensor->file] != file)
      return bad_input(fmt::format("{}/model.safetensors.index.json: tensor {}: expected in {}, found {}", folder_,
                                   printable(name), file,
                                   tensor == nullptr ? "in no file" : "in " + files_[tensor->file]));
  }
  for (const auto& [name, tensor] : tensors_)
    if (!weight_map.contains(name))
      return bad_input(
          fmt::format("{}: tensor {} is not in model.safetensors.index.json", where(tensor), printable(name)));
  return {};
}

Result<WeightFiles> WeightFiles::open(const std::string& folder) {
  constexpr const char* kSingle = "model.safetensors";
  constexpr const char* kIndex = "model.safetensors.index.json";
  WeightFiles files;
  files.folder_ = folder;
  if (!folder_has(folder, kIndex)) {
    if (!folder_has(folder, kSingle))
      return Error(
          Code::kNotFound,
          fmt::format(
              "{}: expected {} or {}, found neither (other weight files are not read; --load-format dummy needs none)",
              folder, kSingle, kIndex));
    RETURN_IF_ERROR(files.add_file(kSingle));
    return files;
  }
  ASSIGN_OR_RETURN(const auto weight_map, read_weight_map(folder, kIndex));
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  if (names.size() > kMaxFiles) return bad_input(fmt::format("{}/{}: more than {} files", folder, kIndex, kMaxFiles));
  for (const std::string& name : names) {
    const Status added = files.add_file(name);
    if (added.ok()) continue;
    if (added.error().code != Code::kNotFound) return added.error();
    return Error(Code::kNotFound, fmt::format("{}; {} names this file, so the model is not whole: fetch it again",
                                              added.error().message, kIndex));
  }
  RETURN_IF_ERROR(files.check_index(weight_map));
  return files;
}

}  // namespace perigee

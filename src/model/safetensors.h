// Safetensors: where each tensor of a model folder lies. Files are mapped, nothing is copied and nothing is executed.
//
// The header is untrusted: every length, count and product is checked before use, and a file must be covered
// by its tensors exactly, without overlap or hole.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/result.h"

namespace perigee {

struct SafetensorsType {
  const char* name;  // as in the file: "BF16"
  int64_t bytes;
};

struct SafetensorsEntry {
  std::string name;
  const SafetensorsType* type = nullptr;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes from the end of the header
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // ascending begin
  uint64_t data_begin = 0;                // byte of the file where the data starts
};

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // the format's own cap

// Parses and checks the header of a whole file given as bytes. Errors name tensor, expected and found, not the file.
Result<SafetensorsHeader> parse_safetensors(std::span<const uint8_t> file);

// A tensor in a mapped file; `data` is not aligned for its type.
struct MappedTensor {
  const SafetensorsType* type = nullptr;
  std::vector<int64_t> shape;
  std::span<const uint8_t> data;
  uint32_t file = 0;                // index into WeightFiles::files()
  std::string description() const;  // "BF16 [16, 256]"
};

std::string shape_text(std::span<const int64_t> shape);  // "[16, 256]"

// All tensors of a folder: model.safetensors, or the shards that model.safetensors.index.json lists.
class WeightFiles {
 public:
  static Result<WeightFiles> open(const std::string& folder);

  const MappedTensor* find(std::string_view name) const;
  const std::map<std::string, MappedTensor, std::less<>>& tensors() const { return tensors_; }
  const std::vector<std::string>& files() const { return files_; }  // names inside the folder
  const std::string& folder() const { return folder_; }
  std::string where(const MappedTensor& tensor) const { return folder_ + "/" + files_[tensor.file]; }

 private:
  Status add_file(const std::string& name);
  Status check_index(const std::map<std::string, std::string>& weight_map) const;

  std::string folder_;
  std::vector<std::string> files_;
  std::vector<MappedFile> maps_;
  std::map<std::string, MappedTensor, std::less<>> tensors_;
};

}  // namespace perigee

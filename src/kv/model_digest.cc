#include "kv/model_digest.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <vector>

#include "base/model_folder.h"

namespace perigee {
namespace {

constexpr size_t kMaxConfigBytes = 16 << 20;
constexpr size_t kSamples = 64, kSampleBytes = 4096;  // of each file

class Digest {
 public:
  Digest() : state_(XXH3_createState(), &XXH3_freeState) { XXH3_128bits_reset(state_.get()); }
  void add(const void* data, size_t size) {
    XXH3_128bits_update(state_.get(), &size, sizeof(size));
    XXH3_128bits_update(state_.get(), data, size);
  }
  void add(const std::string& text) { add(text.data(), text.size()); }
  std::string text() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

}  // namespace

Result<std::string> model_digest(const LoadOptions& options) {
  Digest digest;
  ASSIGN_OR_RETURN(const std::string config, read_in_folder(options.path, "config.json", kMaxConfigBytes));
  digest.add(config);
  digest.add(std::string(options.kimi_linear_biased_routing ? "biased" : ""));
  digest.add(fmt::format("{}", options.latent_norm_eps));
  if (!options.kv_scale_file.empty()) {
    ASSIGN_OR_RETURN(const std::string scales, read_file(options.kv_scale_file, kMaxConfigBytes));
    digest.add(scales);
  }
  if (options.format == LoadFormat::kDummy) return "dummy-" + digest.text();
  std::vector<std::string> names;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator(options.path, failed))
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const std::string path, resolve_in_folder(options.path, name));
    ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
    const auto bytes = file.bytes();
    digest.add(fmt::format("{} {}", name, bytes.size()));
    for (size_t i = 0; i < kSamples; ++i) {
      const size_t first = bytes.size() / kSamples * i;
      digest.add(bytes.data() + first, std::min(kSampleBytes, bytes.size() - first));
    }
  }
  return digest.text();
}

}  // namespace perigee

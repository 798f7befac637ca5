// Registry: which family of networks serves an architecture. A new family is one file and one line here.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/model.h"
#include "model/weights.h"

namespace perigee {

struct Family {
  std::vector<TensorSpec> (*tensors)(const ModelConfig& config);
  std::unique_ptr<Model> (*build)(const ModelConfig& config, WeightReader& reader);
};

// The family of a ModelConfig::architecture, or nullptr.
const Family* find_family(std::string_view architecture);

}  // namespace perigee

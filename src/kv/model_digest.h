// ModelDigest: whether two nodes serve the same model, without reading all of it.
#pragma once

#include <string>

#include "base/result.h"
#include "model/model.h"

namespace perigee {

// XXH3-128 in hexadecimal of what decides the cache's content: config.json, the scales of an fp8 cache, and of each
// file of weights its name, size and evenly spread samples, its header among them. Not against an adversary.
Result<std::string> model_digest(const LoadOptions& options);

}  // namespace perigee

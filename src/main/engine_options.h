// The engine's flags, shared by every command that starts one (serve, bench), under vLLM's spellings.
#pragma once

#include "engine/engine.h"
#include "main/options.h"

namespace perigee {

// Declares the model folder, device, cache and scheduler flags, and the vLLM flags that have no effect here.
void add_engine_options(Options& options);

// Whether `path` is a folder; says so where a model's public name was given.
Status check_model_folder(const std::string& path);

// Turns them into a checked EngineConfig. Errors name the flag, the limit and the way out. Logs one line for each
// accepted flag that has no effect, with the reason.
Result<EngineConfig> engine_config(const Options& options);

}  // namespace perigee

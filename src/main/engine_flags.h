// The flags that say how a model runs, for every command that runs one.
#pragma once

#include <optional>
#include <string>

#include "engine/engine.h"
#include "main/command_line.h"
#include "main/kv_transfer_flags.h"

namespace perigee {

// As vLLM's flags give them. Of pipeline and data only 1 in this version.
struct ParallelSizes {
  int32_t tensor = 1, pipeline = 1, data = 1;
};

struct EngineFlags {
  EngineFlags();

  EngineConfig config;  // before settle() 0 stands for auto in limits and cache size
  std::optional<Device> device;
  ParallelSizes parallel;
  std::string speculative_config;  // JSON: speculation_flag.h
  KvTransferFlags kv_transfer;     // for perigee serve
  std::string tokenizer;           // refused, except the model's own
  bool bf16 = true;                // the dtype of computation: the only choice
};

// Of every command that loads a model: which, and how.
void add_load_flags(CommandLine& flags, LoadOptions& to);

// A flag of the engine is one line here: its name, the field that it sets, what it takes, and its help.
void add_engine_flags(CommandLine& flags, EngineFlags& to);

// Whether the ranks of a dcp group can be some of so many with shards.
Status check_dcp(int32_t dcp_size, int32_t tensor_parallel);

// What parse() has read, with what was auto chosen for the device. Errors: what several flags ask for together does not
// work; no such folder. Logs the device and the flags without effect.
Result<EngineConfig> settle(const CommandLine& flags, EngineFlags read);

Status check_model_folder(const std::string& path);

}  // namespace perigee

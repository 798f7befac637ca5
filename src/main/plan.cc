// `perigee plan MODEL --gpus 4xH200 [serve's flags]`: what each rank takes and what fits beside it, from the model's
// config and the headers of its files.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <utility>

#include "main/commands.h"
#include "main/engine_flags.h"
#include "main/memory_plan.h"

namespace perigee {
namespace {

struct PlanFlags {
  EngineFlags engine;
  std::string gpus;
  bool json = false;
};

bool has_weights(const std::string& folder) {
  std::error_code unknown;
  for (const auto& entry : std::filesystem::directory_iterator(folder, unknown))
    if (entry.path().extension() == ".safetensors") return true;
  return false;
}

// Of the ranks on GPUs that this machine may not have; tensor 0: as many as GPUs.
struct PlannedRanks {
  int32_t tensor = 0, dcp = 1;
};

// Past the checks of what runs here.
Result<Machine> settle_gpus(const std::string& text, PlannedRanks asked, RankConfig& rank) {
  ASSIGN_OR_RETURN(const std::vector<Gpu> gpus, parse_gpus(text));
  rank.size = asked.tensor > 0 ? asked.tensor : static_cast<int32_t>(gpus.size());
  rank.limits.dcp_size = asked.dcp;
  RETURN_IF_ERROR(check_gpus(gpus, rank.size));
  RETURN_IF_ERROR(check_dcp(asked.dcp, rank.size));
  if (rank.size > 1) rank.layout = RankLayout::kTensorParallel;
  return Machine::of_gpus(gpus);
}

Result<int> plan(const std::vector<std::string>& words) {
  PlanFlags read;
  CommandLine flags("perigee plan", "What a model takes on each rank and what fits, before anything is loaded.");
  add_engine_flags(flags, read.engine);
  flags.group("Plan");
  flags.add("--gpus", read.gpus, "GPUs to plan for, such as 4xH200; empty: this machine");
  flags.add_switch("--json", read.json, "print JSON");
  RETURN_IF_ERROR(flags.parse(words));
  PlannedRanks asked;
  if (!read.gpus.empty()) {
    const int32_t tensor = std::exchange(read.engine.parallel.tensor, 1);
    asked.tensor = flags.given("tensor-parallel-size") ? tensor : 0;
    asked.dcp = std::exchange(read.engine.config.rank.limits.dcp_size, 1);
    read.engine.device = Device::kCuda;
  }
  const KvTransferFlags kv_transfer = read.engine.kv_transfer;
  ASSIGN_OR_RETURN(EngineConfig config, settle(flags, std::move(read.engine)));
  RETURN_IF_ERROR(plan_kv_transfer(flags, kv_transfer, config.handover));
  config.rank.load.progress = nullptr;
  if (!has_weights(config.rank.load.path)) config.rank.load.format = LoadFormat::kDummy;  // config.json is enough
  ASSIGN_OR_RETURN(const Machine machine,
                   read.gpus.empty() ? this_machine(config.rank) : settle_gpus(read.gpus, asked, config.rank));
  ASSIGN_OR_RETURN(const MemoryPlan plan, plan_memory(config, machine));
  if (read.json)
    fmt::print("{}\n", dump_json(plan_json(plan)));
  else
    fmt::print("{}", plan_text(plan));
  std::fflush(stdout);
  if (const Status fits = check_fits(config, plan); !fits.ok()) {
    fmt::print(stderr, "perigee plan: {}\n", fits.error().message);
    return 1;
  }
  return 0;
}

}  // namespace

int run_plan(const std::vector<std::string>& words) {
  const auto code = plan(words);
  return code.ok() ? *code : print_refusal("perigee plan", code.error());
}

}  // namespace perigee

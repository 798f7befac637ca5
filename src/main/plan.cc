// `perigee plan MODEL --gpus 4xH200 [serve's flags]`: what each rank takes and what fits beside it, from the model's
// config and the headers of its files.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

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

// GPUs are those of the plan, not of this machine: ranks on them are set here, past the checks of what runs here.
Result<Machine> settle_gpus(const std::string& text, int32_t tensor_parallel, bool given, RankConfig& rank) {
  ASSIGN_OR_RETURN(const std::vector<Gpu> gpus, parse_gpus(text));
  rank.size = given ? tensor_parallel : static_cast<int32_t>(gpus.size());
  RETURN_IF_ERROR(check_gpus(gpus, rank.size));
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
  const int32_t tensor_parallel = read.engine.parallel.tensor;
  if (!read.gpus.empty()) {
    read.engine.device = Device::kCuda;
    read.engine.parallel.tensor = 1;
  }
  ASSIGN_OR_RETURN(EngineConfig config, settle(flags, std::move(read.engine)));
  config.rank.load.progress = nullptr;
  if (!has_weights(config.rank.load.path)) config.rank.load.format = LoadFormat::kDummy;  // config.json is enough
  ASSIGN_OR_RETURN(const Machine machine,
                   read.gpus.empty()
                       ? this_machine(config.rank)
                       : settle_gpus(read.gpus, tensor_parallel, flags.given("tensor-parallel-size"), config.rank));
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

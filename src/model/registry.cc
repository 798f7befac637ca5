#include "model/registry.h"

#include "model/deepseek_v3.h"
#include "model/kimi_linear.h"

namespace perigee {

const Family* find_family(std::string_view architecture) {
  static constexpr Family kDeepseekV3 = {deepseek_v3_tensors, build_deepseek_v3};
  static constexpr std::string_view kDeepseekV3Names[] = {"DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM",
                                                          "Glm4MoeLiteForCausalLM"};
  for (const std::string_view name : kDeepseekV3Names)
    if (architecture == name) return &kDeepseekV3;
  static constexpr Family kKimiLinear = {kimi_linear_tensors, build_kimi_linear};
  return architecture == "KimiLinearForCausalLM" ? &kKimiLinear : nullptr;
}

}  // namespace perigee

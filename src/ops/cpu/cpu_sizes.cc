// The sizes of what CpuOps packs.
#include "ops/cpu/elementwise.h"
#include "ops/cpu/experts.h"
#include "ops/cpu/mla_attend.h"
#include "ops/ops.h"

namespace perigee {
namespace {

class CpuSizes final : public WeightPacker {
 public:
  explicit CpuSizes(OnlineQuantization quantization) : quantization_(quantization) {}
  const char* name() const override { return "cpu"; }
  DType activation_dtype() const override { return DType::kBF16; }
  bool makes_dummy_weights() const override { return true; }

  LinearWeight pack_linear(std::span<const RawMatrix> stacked) override {
    return counted_linear(stacked, cpu::stacked_panels(stacked, quantization_).bytes());
  }
  ExpertWeights pack_experts(std::span<const RawExpert> experts) override {
    return counted_experts(experts, cpu::expert_panels(experts, quantization_).panel_bytes());
  }
  MlaUpWeight pack_mla_up(const RawMatrix&, const MlaShape& shape) override {
    return {.packed = counted_weight(cpu::mla_up_bytes(shape))};
  }
  EmbedWeight pack_embed(const RawMatrix& table) override { return counted_embed(table, cpu::embed_bytes(table)); }

 private:
  const OnlineQuantization quantization_;
};

}  // namespace

std::unique_ptr<WeightPacker> make_cpu_sizes(OnlineQuantization quantization) {
  return std::make_unique<CpuSizes>(quantization);
}

}  // namespace perigee

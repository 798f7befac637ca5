#include "ops/cuda/gemm/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <compare>
#include <map>

#include "base/log.h"
#include "tensor/cuda/device.h"

namespace perigee {
namespace {

constexpr size_t kWorkspaceBytes = 32u << 20;

// The functions used, by their own names.
struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
};

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* so, Library& f) {
  return find(so, "cublasLtCreate", f.create) && find(so, "cublasLtDestroy", f.destroy) &&
         find(so, "cublasLtMatmul", f.matmul) && find(so, "cublasLtMatmulDescCreate", f.desc_create) &&
         find(so, "cublasLtMatmulDescDestroy", f.desc_destroy) &&
         find(so, "cublasLtMatmulDescSetAttribute", f.desc_set) &&
         find(so, "cublasLtMatrixLayoutCreate", f.layout_create) &&
         find(so, "cublasLtMatrixLayoutDestroy", f.layout_destroy) &&
         find(so, "cublasLtMatrixLayoutSetAttribute", f.layout_set) &&
         find(so, "cublasLtMatmulPreferenceCreate", f.preference_create) &&
         find(so, "cublasLtMatmulPreferenceDestroy", f.preference_destroy) &&
         find(so, "cublasLtMatmulPreferenceSetAttribute", f.preference_set) &&
         find(so, "cublasLtMatmulAlgoGetHeuristic", f.heuristic);
}

// What the choice of an algorithm depends on.
struct Key {
  int64_t rows, out, in, heads, w_stride, x_stride, y_stride, w_head, x_head, y_head;
  bool f32_out;
  auto operator<=>(const Key&) const = default;
};

// Descriptors and algorithm for one key. Our row-major y [rows, out] is their column-major [out, rows].
struct Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool usable = false;
};

class Loaded final : public CublasLt {
 public:
  Loaded(const Library& library, cublasLtHandle_t handle)
      : f_(library), handle_(handle), workspace_(device_buffer(kWorkspaceBytes)) {}
  ~Loaded() override {
    for (const auto& [key, p] : plans_) {
      f_.layout_destroy(p.w);
      f_.layout_destroy(p.x);
      f_.layout_destroy(p.y);
      f_.desc_destroy(p.desc);
    }
    f_.destroy(handle_);
  }

  bool multiply(const DenseProduct& p, cudaStream_t stream) override {
    const Plan& plan = plan_for(p);
    const float one = 1, zero = 0;
    return plan.usable &&
           f_.matmul(handle_, plan.desc, &one, p.w, plan.w, p.x, plan.x, &zero, p.y, plan.y, p.y, plan.y,
                     &plan.algorithm, workspace_.data(), kWorkspaceBytes, stream) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  const Plan& plan_for(const DenseProduct& p) {
    const Key key{p.rows,     p.out,    p.in,     p.heads,  p.w_stride, p.x_stride,
                  p.y_stride, p.w_head, p.x_head, p.y_head, p.f32_out};
    const auto known = plans_.find(key);
    return known != plans_.end() ? known->second : plans_.emplace(key, make_plan(p)).first->second;
  }

  Plan make_plan(const DenseProduct& p) {
    Plan plan;
    f_.desc_create(&plan.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    f_.desc_set(plan.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed));
    plan.w = layout(CUDA_R_16BF, p.in, p.out, p.w_stride, p.heads, p.w_head);
    plan.x = layout(CUDA_R_16BF, p.in, p.rows, p.x_stride, p.heads, p.x_head);
    plan.y = layout(p.f32_out ? CUDA_R_32F : CUDA_R_16BF, p.out, p.rows, p.y_stride, p.heads, p.y_head);
    cublasLtMatmulPreference_t preference = nullptr;
    f_.preference_create(&preference);
    const size_t workspace = kWorkspaceBytes;
    f_.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace));
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t status =
        f_.heuristic(handle_, plan.desc, plan.w, plan.x, plan.y, plan.y, preference, 1, &best, &found);
    f_.preference_destroy(preference);
    plan.usable = status == CUBLAS_STATUS_SUCCESS && found > 0;
    plan.algorithm = best.algo;
    return plan;
  }

  cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t stride, int64_t heads,
                                int64_t head_stride) {
    cublasLtMatrixLayout_t made = nullptr;
    f_.layout_create(&made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), stride);
    const auto count = static_cast<int32_t>(heads);
    f_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count));
    f_.layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &head_stride, sizeof(head_stride));
    return made;
  }

  const Library f_;
  const cublasLtHandle_t handle_;
  Buffer workspace_;
  std::map<Key, Plan> plans_;  // mixed steps have any number of rows, so they become many
};

}  // namespace

std::unique_ptr<CublasLt> CublasLt::load() {
  void* so = ::dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  Library library{};
  cublasLtHandle_t handle = nullptr;
  if (so == nullptr || !find_all(so, library) || library.create(&handle) != CUBLAS_STATUS_SUCCESS) {
    log_info("no usable libcublasLt.so.13: large dense products run on our own kernels");
    return nullptr;
  }
  return std::make_unique<Loaded>(library, handle);
}

}  // namespace perigee

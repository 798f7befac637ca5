// Big dense products by cuBLASLt, loaded at run time so that programs start where it is not installed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

namespace perigee {

// y = x W^T for each head; bf16 operands, f32 sums, y f32 or bf16. Strides in elements.
struct DenseProduct {
  const uint16_t* x = nullptr;
  int64_t x_stride = 0, x_head = 0;
  const uint16_t* w = nullptr;
  int64_t w_stride = 0, w_head = 0;
  void* y = nullptr;
  int64_t y_stride = 0, y_head = 0;
  int64_t rows = 0, out = 0, in = 0, heads = 1;
  bool f32_out = false;
};

class CublasLt {
 public:
  // Null: there is no libcublasLt.so.13, or it refuses to start.
  static std::unique_ptr<CublasLt> load();
  virtual ~CublasLt() = default;
  // False: no algorithm fits, or the launch failed; nothing was started then.
  virtual bool multiply(const DenseProduct& product, cudaStream_t stream) = 0;
};

}  // namespace perigee

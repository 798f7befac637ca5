// CpuContext: what every free function of this backend is given besides its operands.
#pragma once

#include "base/thread_pool.h"
#include "ops/cpu/isa.h"
#include "tensor/tensor.h"

namespace perigee {

struct CpuContext {
  ThreadPool& pool;
  Arena& arena;  // results: live until the step's end
  Arena&
      scratch;  // working memory of one call: a function that uses it resets it first, so it does not add up by layer
  Isa isa = Isa::kAvx2;
};

}  // namespace perigee

// Hopper's warpgroup products of 64 rows with 64, 128, 192 or 256 columns, bf16, both operands major K (wgmma.cuh has
// the layouts): d += a b. The left operand lies in shared memory, or in registers as A fragments of mma.cuh by warp.
#pragma once

#include "ops/cuda/wgmma.cuh"

namespace perigee {

// Operand numbers and accumulators of the instructions, 32 at a time.
#define PERIGEE_PLACES_0                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PERIGEE_PLACES_1                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PERIGEE_PLACES_2                                                             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PERIGEE_PLACES_3                                                                         \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PERIGEE_SUMS_8(i)                                                                                     \
  "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define PERIGEE_SUMS_32(i) \
  PERIGEE_SUMS_8(i), PERIGEE_SUMS_8((i) + 8), PERIGEE_SUMS_8((i) + 16), PERIGEE_SUMS_8((i) + 24)

__device__ __forceinline__ void wgmma_add(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 "}, %32, %33, 1, 1, 1, 0, 0;"
               : PERIGEE_SUMS_32(0)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_add(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PERIGEE_PLACES_0
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : PERIGEE_SUMS_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_add(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               "}, %64, %65, 1, 1, 1, 0, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_add(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_add(float (&d)[96], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               ", " PERIGEE_PLACES_2 "}, %96, %97, 1, 1, 1, 0, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32), PERIGEE_SUMS_32(64)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_add(float (&d)[96], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               ", " PERIGEE_PLACES_2 "}, {%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32), PERIGEE_SUMS_32(64)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_add(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               ", " PERIGEE_PLACES_2 ", " PERIGEE_PLACES_3 "}, %128, %129, 1, 1, 1, 0, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32), PERIGEE_SUMS_32(64), PERIGEE_SUMS_32(96)
               : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_add(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PERIGEE_PLACES_0 ", " PERIGEE_PLACES_1
               ", " PERIGEE_PLACES_2 ", " PERIGEE_PLACES_3 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
               : PERIGEE_SUMS_32(0), PERIGEE_SUMS_32(32), PERIGEE_SUMS_32(64), PERIGEE_SUMS_32(96)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef PERIGEE_PLACES_0
#undef PERIGEE_PLACES_1
#undef PERIGEE_PLACES_2
#undef PERIGEE_PLACES_3
#undef PERIGEE_SUMS_8
#undef PERIGEE_SUMS_32

}  // namespace perigee

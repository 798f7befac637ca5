// How much time tests may take: more when PERIGEE_SOAK is set in the environment (make soak), less in a build whose
// every access is checked (the sanitizer presets define PERIGEE_SANITIZED), and less under a checker of GPU accesses
// (tools/gpu_checks.py sanitize sets PERIGEE_GPU_SANITIZER in the environment to the tool's name).
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string_view>
#include <vector>

namespace perigee {

#ifdef PERIGEE_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline bool soak_requested() {
  return std::getenv("PERIGEE_SOAK") != nullptr;
}

// A checker follows every access of a kernel: tests of several backends run the GPU's alone, temporary arrays are
// allocations of their own, and cases are few and small but still launch every kernel.
inline bool gpu_sanitizer() {
  return std::getenv("PERIGEE_GPU_SANITIZER") != nullptr;
}

// Whether cuBLASLt stays unused: initcheck takes what its bulk stores write for unwritten, racecheck reports its
// kernels.
inline bool gpu_sanitizer_of_own_kernels() {
  const std::string_view tool = gpu_sanitizer() ? std::getenv("PERIGEE_GPU_SANITIZER") : "";
  return tool == "initcheck" || tool == "racecheck";
}

// All cases, or under sanitizers the first and the last.
template <typename T>
std::vector<T> ends_if_sanitized(std::initializer_list<T> all) {
  if (kSanitized && all.size() > 2) return {*all.begin(), *(all.end() - 1)};
  return all;
}

// All cases, or under a checker of GPU accesses the few.
template <typename T>
std::vector<T> few_if_gpu_sanitizer(std::vector<T> all, std::vector<T> few) {
  return gpu_sanitizer() ? few : all;
}

}  // namespace perigee

// NCCL, loaded at run time: the few functions that are called, declared as its ABI has them.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "base/result.h"

namespace perigee {

struct NcclId {
  char bytes[128];
};

struct NcclLibrary {
  // Of the process. kUnavailable: libnccl.so.2 is not there, or lacks a function.
  static Result<const NcclLibrary*> load();

  // All return 0, or an error for error_text().
  int (*version)(int* number);
  int (*make_id)(NcclId* id);
  int (*join)(void** comm, int size, NcclId id, int rank);
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* comm, cudaStream_t stream);
  int (*abort)(void* comm);
  int (*destroy)(void* comm);
  const char* (*error_text)(int error);
  static constexpr int kBytes = 1;  // a type of numbers
};

std::string nccl_version(const NcclLibrary& library);  // "2.28.3"

}  // namespace perigee

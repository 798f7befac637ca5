#include "comm/cuda/nccl_library.h"

#include <dlfcn.h>
#include <fmt/core.h>

#include <cstdlib>
#include <mutex>

namespace perigee {
namespace {

template <typename Function>
void find(void* library, const char* name, Function*& function, std::string& missing) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) missing = name;
}

// What is wrong; empty: nothing.
std::string load_into(NcclLibrary& nccl) {
  // NVLink multicast stays off: a process that dies in it can take the host's other GPUs along.
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  std::string missing;
  find(library, "ncclGetVersion", nccl.version, missing);
  find(library, "ncclGetUniqueId", nccl.make_id, missing);
  find(library, "ncclCommInitRank", nccl.join, missing);
  find(library, "ncclAllGather", nccl.all_gather, missing);
  find(library, "ncclCommAbort", nccl.abort, missing);
  find(library, "ncclCommDestroy", nccl.destroy, missing);
  find(library, "ncclGetErrorString", nccl.error_text, missing);
  return missing.empty() ? "" : "libnccl.so.2 lacks " + missing;
}

}  // namespace

Result<const NcclLibrary*> NcclLibrary::load() {
  static std::once_flag once;
  static NcclLibrary library;
  static std::string wrong;
  std::call_once(once, [] { wrong = load_into(library); });
  if (wrong.empty()) return &library;
  return Error(Code::kUnavailable, "--comm nccl: " + wrong, "comm");
}

std::string nccl_version(const NcclLibrary& library) {
  int number = 0;
  if (library.version(&number) != 0) return "of no version";
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

}  // namespace perigee

// A library that the CUDA driver loads into any program (CUDA_INJECTION64_PATH): at the program's end, the mangled
// names of the kernels that ran, each once, are written to the file $PERIGEE_LAUNCHED_KERNELS.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>

#include "tensor/cuda/activity.h"

namespace perigee {
namespace {

ActivityTrace* trace = nullptr;

void write_names() {
  const char* path = std::getenv("PERIGEE_LAUNCHED_KERNELS");
  const auto activities = trace->stop();
  if (path == nullptr || !activities.ok()) {
    std::fprintf(stderr, "no list of kernels: %s\n",
                 path == nullptr ? "PERIGEE_LAUNCHED_KERNELS is not set" : activities.error().message.c_str());
    return;
  }
  std::set<std::string> names;
  for (const DeviceActivity& activity : *activities)
    if (activity.kind == DeviceActivity::Kind::kKernel) names.insert(activity.name);
  std::ofstream file(path);
  for (const std::string& name : names) file << name << "\n";
}

}  // namespace
}  // namespace perigee

// The driver calls it once, before the program's first call does anything.
extern "C" int InitializeInjection() {
  auto created = perigee::ActivityTrace::create();
  if (!created.ok() || !(*created)->start(false).ok()) {
    std::fprintf(stderr, "no list of kernels: %s\n",
                 created.ok() ? "the trace fails" : created.error().message.c_str());
    return 0;
  }
  perigee::trace = created->release();
  std::atexit(perigee::write_names);
  return 1;
}

// What `perigee doctor` knows of a machine: processor, memory, GPUs and the links between them, and what is wrong with
// each for serving.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "comm/cuda/peer_links.h"
#include "tensor/cuda/gpus.h"

namespace perigee {

struct MachineReport {
  struct Cpu {
    std::string model;    // as the system names it
    std::string backend;  // "cpu-avx2"; empty: none
    std::string why_none;
    int cores = 0;             // that this process may use
    int64_t memory_bytes = 0;  // that this process may have
    double read_gbs = 0;       // measured
  };
  Cpu cpu;
  std::vector<Gpu> gpus;
  std::vector<std::string> gpu_states;  // a line of each, with what is wrong with it in capitals
  std::string why_no_gpu;
  std::vector<PeerLink> links;  // of every pair of GPUs
};

// Takes about a second: fills `read_bytes` of memory, at most a quarter of what this process may have, and reads it
// several times; and as long again for each pair of GPUs.
MachineReport inspect_machine(int64_t read_bytes);

// What should be changed before serving here; empty: nothing.
std::vector<std::string> findings(const MachineReport& report);
std::string report_text(const MachineReport& report);
Json report_json(const MachineReport& report);

}  // namespace perigee

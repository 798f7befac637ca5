// `perigee doctor`: the machine as perigee sees it, and what is wrong with it.
#include <fmt/format.h>

#include "main/command_line.h"
#include "main/commands.h"
#include "main/machine_report.h"

namespace perigee {

int run_doctor(const std::vector<std::string>& words) {
  bool json = false;
  int64_t read_mib = 1024;
  CommandLine flags("perigee doctor",
                    "Processor, memory, GPUs and links of this machine, and what is wrong with them.");
  flags.add_switch("--json", json, "print JSON");
  flags.add("--read-mib", read_mib, Whole{16, 1 << 16},
            "memory that is taken and read to measure its rate, at most a quarter of what there is");
  if (const Status status = flags.parse(words); !status.ok()) return print_refusal("perigee doctor", status.error());
  const MachineReport report = inspect_machine(read_mib << 20);
  fmt::print("{}", json ? dump_json(report_json(report)) + "\n" : report_text(report));
  return findings(report).empty() ? 0 : 1;
}

}  // namespace perigee

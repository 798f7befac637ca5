#include "server/process_metrics.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace perigee {

namespace {

prometheus::Gauge& gauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

// The fields of /proc/self/stat from the state on, which is field 3 (proc(5)); the command before it may hold blanks.
std::vector<std::string> stat_fields() {
  std::string line;
  std::getline(std::ifstream("/proc/self/stat"), line);
  const size_t end = line.rfind(')');
  std::vector<std::string> fields;
  if (end == std::string::npos) return fields;
  std::istringstream rest(line.substr(end + 1));
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

// Seconds since 1970 at which the machine was started; 0 when it cannot be told.
double boot_time_s() {
  std::ifstream stat("/proc/stat");
  for (std::string name; stat >> name;) {
    double value = 0;
    if (name == "btime" && stat >> value) return value;
    stat.ignore(1 << 20, '\n');
  }
  return 0;
}

}  // namespace

ProcessMetrics::ProcessMetrics(prometheus::Registry& registry)
    : cpu_seconds_(prometheus::BuildCounter()
                       .Name("process_cpu_seconds_total")
                       .Help("Processor time, user and system.")
                       .Register(registry)
                       .Add({})),
      resident_bytes_(gauge(registry, "process_resident_memory_bytes", "Resident memory.")),
      virtual_bytes_(gauge(registry, "process_virtual_memory_bytes", "Virtual memory.")),
      start_time_(gauge(registry, "process_start_time_seconds", "Start, seconds since 1970.")),
      open_fds_(gauge(registry, "process_open_fds", "Open file descriptors.")),
      max_fds_(gauge(registry, "process_max_fds", "Limit of open file descriptors.")),
      threads_(gauge(registry, "process_threads", "Threads.")) {
  prometheus::BuildGauge()
      .Name("perigee_build_info")
      .Help("Always 1; what is running, as labels.")
      .Register(registry)
      .Add({{"version", PERIGEE_VERSION}})
      .Set(1);
}

void ProcessMetrics::read() {
  timespec cpu{};  // of all threads; /proc/self/stat counts it in ticks, of which a young process has none
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu) == 0) {
    const double cpu_s = static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec);
    cpu_seconds_.Increment(std::max(0.0, cpu_s - cpu_seconds_.Value()));
  }
  constexpr size_t kThreads = 17, kStart = 19, kVirtual = 20, kResident = 21;
  const std::vector<std::string> fields = stat_fields();
  if (fields.size() > kResident) {
    const auto number = [&](size_t at) { return std::strtod(fields[at].c_str(), nullptr); };
    const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
    threads_.Set(number(kThreads));
    start_time_.Set(boot_time_s() + number(kStart) / ticks);
    virtual_bytes_.Set(number(kVirtual));
    resident_bytes_.Set(number(kResident) * static_cast<double>(::sysconf(_SC_PAGESIZE)));
  }
  std::error_code error;
  std::filesystem::directory_iterator fds("/proc/self/fd", error);
  if (!error) open_fds_.Set(static_cast<double>(std::distance(begin(fds), end(fds))) - 1);  // without its own
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) max_fds_.Set(static_cast<double>(limit.rlim_cur));
}

}  // namespace perigee

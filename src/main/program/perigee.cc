#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "main/commands.h"

namespace {

constexpr char kUsage[] =
    "perigee " PERIGEE_VERSION
    ": serves Kimi-family language models\n"
    "\n"
    "  perigee serve MODEL [flags]     OpenAI-compatible server\n"
    "  perigee router [flags]          one address in front of several servers, prefill and decode apart or not\n"
    "  perigee bench serve [flags]     load a running server, print throughput and latencies\n"
    "  perigee bench decode [flags]    decode matrix, context x concurrency, of a running server\n"
    "  perigee bench prefill [flags]   prefill table of a running server\n"
    "  perigee bench step MODEL        time of one step in this process; --trace: where it goes\n"
    "  perigee plan MODEL [flags]      what each rank takes and what fits, --gpus 4xH200 or on this machine\n"
    "  perigee calibrate MODEL [flags] scales of an fp8 cache, from prompts\n"
    "  perigee doctor                  processor, memory, GPUs and links of this machine, and what is wrong\n"
    "  perigee inspect MODEL           what a model is, what it needs, whether its files are complete\n"
    "  perigee --version\n"
    "\n"
    "`perigee COMMAND --help` lists the flags of a command.\n";

// Where the caller has closed one of the three, the next file or connection would get its number, and the log.
void open_standard_files() {
  for (int fd = 0; fd <= 2; ++fd)
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != fd) std::abort();
}

// The exit code, unless what was printed has not arrived: a full disk must not look like success.
int flushed(int code) {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return code;
  std::fputs("perigee: standard output cannot be written: is the disk full?\n", stderr);
  return code == 0 ? 1 : code;
}

int run(const std::vector<std::string>& words) {
  const std::string command = words.empty() ? "" : words[0];
  const std::vector<std::string> rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (command == "serve") return perigee::run_serve(rest);
  if (command == "router") return perigee::run_router(rest);
  if (command == "bench") return perigee::run_bench(rest);
  if (command == "plan") return perigee::run_plan(rest);
  if (command == "doctor") return perigee::run_doctor(rest);
  if (command == "calibrate") return perigee::run_calibrate(rest);
  if (command == "inspect") return perigee::run_inspect(rest);
  if (command == "--version") return std::printf("perigee %s\n", PERIGEE_VERSION) < 0;
  const bool asked = command == "--help" || command == "-h";
  std::fputs(kUsage, asked ? stdout : stderr);
  if (!asked && !command.empty()) std::fprintf(stderr, "\nunknown command \"%s\"\n", command.c_str());
  return asked ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_files();
  return flushed(run(std::vector<std::string>(argv + 1, argv + argc)));
}

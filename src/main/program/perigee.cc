#include <cstdio>
#include <string>
#include <vector>

#include "main/commands.h"

namespace {

constexpr char kUsage[] =
    "perigee " PERIGEE_VERSION
    ": serves Kimi-family language models\n"
    "\n"
    "  perigee serve MODEL [flags]     OpenAI-compatible server\n"
    "  perigee bench serve [flags]     load a running server, print throughput and latencies\n"
    "  perigee bench decode [flags]    decode matrix, context x concurrency, of a running server\n"
    "  perigee bench prefill [flags]   prefill table of a running server\n"
    "  perigee bench step MODEL        time of one step in this process; --trace: where it goes\n"
    "  perigee inspect MODEL           what a checkpoint is and what it needs\n"
    "  perigee --version\n"
    "\n"
    "`perigee COMMAND --help` lists the flags of a command.\n";

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string command = words.empty() ? "" : words[0];
  const std::vector<std::string> rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (command == "serve") return perigee::run_serve(rest);
  if (command == "bench") return perigee::run_bench(rest);
  if (command == "inspect") return perigee::run_inspect(rest);
  if (command == "--version") return std::printf("perigee %s\n", PERIGEE_VERSION) < 0;
  const bool asked = command == "--help" || command == "-h";
  std::fputs(kUsage, asked ? stdout : stderr);
  if (!asked && !command.empty()) std::fprintf(stderr, "\nunknown command \"%s\"\n", command.c_str());
  return asked ? 0 : 2;
}

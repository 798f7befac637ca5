// CommandLine: the flags of one command, each bound to the field of the configuration that it sets. CLI11 does the
// work.
//
//   flags.add("--max-num-seqs", config.rank.limits.max_sequences, Whole{1, 65536}, "sequences that run together");
//
// With that line PERIGEE_MAX_NUM_SEQS in the environment and the key max-num-seqs of the --config file set the field,
// too: command line > environment > file > what the field held before, the default that --help shows.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "main/flag_values.h"

namespace perigee {

class FlagApp;  // CLI11's, and what is added to it

class CommandLine {
 public:
  CommandLine(const std::string& command, const std::string& summary);  // "perigee serve"
  ~CommandLine();

  void group(const std::string& heading);  // in --help, of the flags that are added from here on

  // `names` as CLI11 reads them: "--NAME", "model,--model" (a word without a flag), "--tensor-parallel-size,--tp",
  // whose second name may also be written with one dash, as vLLM has it. `values` is one of flag_values.h. The fields
  // must outlive parse().
  template <typename T, typename Values>
  void add(const std::string& names, T& field, const Values& values, const std::string& help) {
    add_value(names, help, values.shown(field), [&field, values](const std::string& text) {
      return values.read(text, field) ? std::string() : values.expected();
    });
  }
  void add(const std::string& names, std::string& field, const std::string& help) {
    add(names, field, AnyText(), help);
  }
  void add_list(const std::string& names, std::vector<std::string>& field, const std::string& help);
  void add_switch(const std::string& name, bool& field, const std::string& help);  // also --no-NAME, --NAME=false

  // Accepted without effect; log_ignored() says why.
  void add_ignored_value(const std::string& name, const std::string& why);
  void add_ignored_switch(const std::string& name, const std::string& why);

  void add_config_file();  // --config

  // `words` without the command's name. Errors name the flag, what it takes and where the value came from. kCancelled,
  // with the help as message: that is what was asked for.
  Status parse(const std::vector<std::string>& words);

  bool given(const std::string& name) const;  // "max-num-seqs": it is not a default
  void log_ignored() const;  // a line for each flag given without effect, and one for all variables of vLLM and NCCL
  std::string resolved() const;        // "name: value (source)" lines; secrets are masked
  std::string resolved_given() const;  // the same of those that are not defaults, on one line

 private:
  // `read` returns what the flag takes when the text is not that.
  void add_value(const std::string& names, const std::string& help, const std::string& shown,
                 std::function<std::string(const std::string& text)> read);
  const std::unique_ptr<FlagApp> app_;
};

// Prints why a command does not run, or the help that was asked for; the exit code.
int print_refusal(const std::string& command, const Error& error);

}  // namespace perigee

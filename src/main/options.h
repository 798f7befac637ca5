// Options: one table of settings that come from the command line, the environment, a YAML file or a default.
//
// Order: command line > environment (PERIGEE_<NAME>) > file (--config) > default. An unknown flag or key is an error
// that names the nearest known one. The table remembers where each value came from, for the resolved-config printout.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/result.h"

namespace perigee {

enum class OptionSource { kDefault, kFile, kEnvironment, kCommandLine };
const char* source_name(OptionSource source);

class Options {
 public:
  enum class Kind { kValue, kList, kSwitch };  // a switch also has a --no-NAME form

  struct Option {
    std::string name;  // long-kebab, as vLLM spells it
    std::string help;
    Kind kind = Kind::kValue;
    std::string group;                // heading in --help
    std::vector<std::string> values;  // current; a switch holds "true" or "false"
    OptionSource source = OptionSource::kDefault;
  };

  Options(std::string command, std::string summary) : command_(std::move(command)), summary_(std::move(summary)) {}

  void add(const std::string& name, const std::string& default_value, const std::string& help,
           const std::string& group = "General");
  void add_list(const std::string& name, const std::string& help, const std::string& group = "General");
  void add_switch(const std::string& name, bool default_value, const std::string& help,
                  const std::string& group = "General");
  // Another spelling of an option: "-tp" for "tensor-parallel-size".
  void alias(const std::string& spelling, const std::string& name);
  // A word without a flag: `perigee serve MODEL`.
  void positional(const std::string& name, const std::string& help);

  // `arguments` are the words after the command's name. kCancelled with the help text as message for --help.
  Status parse(const std::vector<std::string>& arguments);

  const std::string& text(const std::string& name) const;  // "" when unset
  const std::vector<std::string>& list(const std::string& name) const;
  bool enabled(const std::string& name) const;
  Result<int64_t> integer(const std::string& name, int64_t low, int64_t high) const;
  Result<double> number(const std::string& name, double low, double high) const;
  // Sizes: 4096, 512M, 4G, 1.5GiB.
  Result<int64_t> bytes(const std::string& name) const;
  bool given(const std::string& name) const { return find(name).source != OptionSource::kDefault; }

  std::string help() const;
  std::string resolved_given() const;  // the same for options that are not defaults, on one line
  std::string resolved() const;        // "name: value  (source)" lines; secrets are masked

 private:
  struct Pending {
    std::string name;
    std::string value;
  };
  static std::string shown(const Option& option);
  const Option& find(const std::string& name) const;
  Option* lookup(const std::string& name);
  Status read_arguments(const std::vector<std::string>& arguments, std::vector<Pending>& out);
  Result<std::string> plain_switch(const std::string& word);
  Status read_file(const std::string& path);
  Status read_environment();
  Status apply(const std::vector<Pending>& pending, OptionSource source, const std::string& origin);
  void warn_of_variables() const;
  std::string nearest_name(const std::string& name) const;  // "": none is near
  std::string nearest(const std::string& name, const char* dashes = "") const;

  std::string command_, summary_;
  std::string positional_name_;
  std::vector<Option> options_;
  std::map<std::string, std::string> aliases_;
};

}  // namespace perigee

#include "main/options.h"

#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/log.h"

namespace perigee {
namespace {

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
    }
  }
  return row[b.size()];
}

std::string environment_name(const std::string& option) {
  std::string name = "PERIGEE_" + option;
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return name;
}

bool parse_bool(const std::string& text, bool& out) {
  if (text == "true" || text == "1" || text == "yes" || text == "on") return out = true, true;
  if (text == "false" || text == "0" || text == "no" || text == "off") return out = false, true;
  return false;
}

bool is_secret(const std::string& name) {
  return name.find("api-key") != std::string::npos;
}

}  // namespace

const char* source_name(OptionSource source) {
  switch (source) {
    case OptionSource::kDefault: return "default";
    case OptionSource::kFile: return "file";
    case OptionSource::kEnvironment: return "environment";
    case OptionSource::kCommandLine: return "command line";
  }
  return "?";
}

void Options::add(const std::string& name, const std::string& default_value, const std::string& help,
                  const std::string& group) {
  options_.push_back({.name = name, .help = help, .kind = Kind::kValue, .group = group, .values = {default_value}});
}

void Options::add_list(const std::string& name, const std::string& help, const std::string& group) {
  options_.push_back({.name = name, .help = help, .kind = Kind::kList, .group = group});
}

void Options::add_switch(const std::string& name, bool default_value, const std::string& help,
                         const std::string& group) {
  options_.push_back({.name = name,
                      .help = help,
                      .kind = Kind::kSwitch,
                      .group = group,
                      .values = {default_value ? "true" : "false"}});
}

void Options::alias(const std::string& spelling, const std::string& name) {
  aliases_[spelling] = name;
}

void Options::positional(const std::string& name, const std::string& help) {
  add(name, "", help);
  positional_name_ = name;
}

Options::Option* Options::lookup(const std::string& name) {
  const auto found = std::find_if(options_.begin(), options_.end(), [&](const Option& o) { return o.name == name; });
  return found == options_.end() ? nullptr : &*found;
}

const Options::Option& Options::find(const std::string& name) const {
  const Option* option = const_cast<Options*>(this)->lookup(name);
  CHECK(option != nullptr, "no option ", name);
  return *option;
}

const std::string& Options::text(const std::string& name) const {
  static const std::string kEmpty;
  const Option& option = find(name);
  return option.values.empty() ? kEmpty : option.values.front();
}

const std::vector<std::string>& Options::list(const std::string& name) const {
  return find(name).values;
}

bool Options::enabled(const std::string& name) const {
  return text(name) == "true";
}

Result<int64_t> Options::integer(const std::string& name, int64_t low, int64_t high) const {
  const std::string& value = text(name);
  int64_t parsed = 0;
  const auto end = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (end.ec != std::errc() || end.ptr != value.data() + value.size() || parsed < low || parsed > high)
    return bad_input(str_cat("--", name, " must be a whole number from ", low, " to ", high, ", not \"", value, "\""),
                     name);
  return parsed;
}

Result<double> Options::number(const std::string& name, double low, double high) const {
  const std::string& value = text(name);
  double parsed = 0;
  const auto end = std::from_chars(value.data(), value.data() + value.size(), parsed);
  if (end.ec != std::errc() || end.ptr != value.data() + value.size() || !(parsed >= low && parsed <= high))
    return bad_input(str_cat("--", name, " must be a number from ", low, " to ", high, ", not \"", value, "\""), name);
  return parsed;
}

Result<int64_t> Options::bytes(const std::string& name) const {
  const std::string& value = text(name);
  double parsed = 0;
  const auto end = std::from_chars(value.data(), value.data() + value.size(), parsed);
  const std::string unit(end.ptr, value.data() + value.size());
  static const std::map<std::string, double> kUnits = {{"", 1},         {"K", 0x1p10},   {"M", 0x1p20},  {"G", 0x1p30},
                                                       {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  const auto found = kUnits.find(unit);
  if (end.ec != std::errc() || found == kUnits.end() || !(parsed > 0) || parsed * found->second > 0x1p50)
    return bad_input(str_cat("--", name, " must be a size such as 4096, 512M or 4G, not \"", value, "\""), name);
  return static_cast<int64_t>(parsed * found->second);
}

std::string Options::nearest_name(const std::string& name) const {
  std::string best;
  size_t distance = name.size() / 3 + 1;
  for (const Option& option : options_) {
    const bool begun = name.size() >= 4 && option.name.starts_with(name);
    if (const size_t d = begun ? 1 : edit_distance(name, option.name); d < distance) {
      distance = d;
      best = option.name;
    }
  }
  return best;
}

std::string Options::nearest(const std::string& name, const char* dashes) const {
  const std::string best = nearest_name(name);
  if (best.empty()) return "; leave it out, or see --help";
  return str_cat("; did you mean \"", dashes, best, "\"?");
}

Status Options::apply(const std::vector<Pending>& pending, OptionSource source, const std::string& origin) {
  std::vector<Option*> fresh;
  for (const Pending& item : pending) {
    Option* option = lookup(item.name);
    if (option == nullptr)
      return bad_input(str_cat(origin, " has the unknown key \"", item.name, "\"", nearest(item.name)));
    bool flag = false;
    if (option->kind == Kind::kSwitch && !parse_bool(item.value, flag))
      return bad_input(str_cat(origin, ": \"", item.name, "\" is a switch: true or false, not \"", item.value, "\""));
    const bool first = std::find(fresh.begin(), fresh.end(), option) == fresh.end();
    if (first) fresh.push_back(option);
    if (first || option->kind != Kind::kList) option->values.clear();
    option->values.push_back(option->kind == Kind::kSwitch ? (flag ? "true" : "false") : item.value);
    option->source = source;
  }
  return {};
}

Status Options::read_file(const std::string& path) {
  std::vector<Pending> pending;
  try {
    const YAML::Node root = YAML::LoadFile(path);
    if (!root.IsMap()) return bad_input(path + ": must be a map of flag names to values");
    for (const auto& entry : root) {
      const auto name = entry.first.as<std::string>();
      if (const Option* option = lookup(name);
          entry.second.IsSequence() && option != nullptr && option->kind != Kind::kList)
        return bad_input(str_cat(path, ": \"", name, "\" takes one value, not a list"), name);
      if (entry.second.IsSequence())
        for (const auto& item : entry.second) pending.push_back({name, item.as<std::string>()});
      else
        pending.push_back({name, entry.second.as<std::string>()});
    }
  } catch (const YAML::BadFile&) {
    return bad_input(str_cat("--config ", path, " cannot be read"), "config");
  } catch (const YAML::Exception& error) {
    return bad_input(str_cat(path, ": ", error.what()));
  }
  return apply(pending, OptionSource::kFile, path);
}

// Variables that miss an option's name by little. Others may be other commands'.
void Options::warn_of_variables() const {
  constexpr std::string_view kPrefix = "PERIGEE_";
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    const std::string_view whole = *each, variable = whole.substr(0, whole.find('='));
    if (!variable.starts_with(kPrefix)) continue;
    std::string name(variable.substr(kPrefix.size()));
    for (char& c : name) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    const std::string near = nearest_name(name);
    if (!near.empty() && near != name)
      log_warning(variable, " has no effect; did you mean ", environment_name(near), "?");
  }
}

Status Options::read_environment() {
  std::vector<Pending> pending;
  for (const Option& option : options_)
    if (const char* value = std::getenv(environment_name(option.name).c_str())) pending.push_back({option.name, value});
  return apply(pending, OptionSource::kEnvironment, "the environment");
}

Status Options::read_arguments(const std::vector<std::string>& arguments, std::vector<Pending>& out) {
  CLI::App app(summary_, command_);
  app.set_help_flag();
  std::map<std::string, std::vector<std::string>> values;
  for (const Option& option : options_) {
    const std::string spelling =
        option.name == positional_name_ ? option.name + ",--" + option.name : "--" + option.name;
    if (option.kind == Kind::kSwitch) {
      app.add_flag_callback("--" + option.name, [&out, name = option.name] { out.push_back({name, "true"}); });
      app.add_flag_callback("--no-" + option.name, [&out, name = option.name] { out.push_back({name, "false"}); });
    } else if (option.kind == Kind::kList) {
      app.add_option(spelling, values[option.name])->expected(1, 64);
    } else if (option.name == positional_name_) {
      app.add_option(spelling, values[option.name])->take_all();
    } else {
      app.add_option(spelling, values[option.name])->expected(1)->allow_extra_args(false)->take_last();
    }
  }
  app.allow_extras();
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  try {
    app.parse(reversed);
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string what = error.what(), flag = what.substr(0, what.find(':'));
    return bad_input(str_cat(flag, " needs a value (", flag, " VALUE); see --help"), flag.substr(2));
  } catch (const CLI::ParseError& error) {
    return bad_input(error.what());
  }
  for (const std::string& extra : app.remaining()) {
    const std::string bare = extra.substr(std::min(extra.find_first_not_of('-'), extra.size()));
    return bad_input(str_cat("unknown flag or word \"", extra, "\"", nearest(bare.substr(0, bare.find('=')), "--")));
  }
  if (const auto& given = values[positional_name_]; given.size() > 1)
    return bad_input(str_cat("more than one ", positional_name_, ": ", given[0], " and ", given[1]), positional_name_);
  for (auto& [name, given] : values)
    for (std::string& value : given) out.push_back({name, std::move(value)});
  return {};
}

// "--NAME=off" as "--no-NAME", which CLI11 would take for nothing at all; other words as they are.
Result<std::string> Options::plain_switch(const std::string& word) {
  const size_t end = word.find('=');
  if (!word.starts_with("--") || end == std::string::npos) return word;
  std::string name = word.substr(2, end - 2);
  const bool negated = lookup(name) == nullptr && name.starts_with("no-");
  if (negated) name.erase(0, 3);
  const Option* option = lookup(name);
  if (option == nullptr || option->kind != Kind::kSwitch) return word;
  bool on = false;
  if (!parse_bool(word.substr(end + 1), on))
    return bad_input(str_cat("--", name, " is a switch: true or false, not \"", word.substr(end + 1), "\""), name);
  return str_cat(on != negated ? "--" : "--no-", name);
}

Status Options::parse(const std::vector<std::string>& arguments) {
  std::vector<std::string> words;
  for (const std::string& word : arguments) {
    if (word == "--help" || word == "-h") return Error(Code::kCancelled, help());
    const size_t end = std::min(word.find('='), word.size());  // -tp=8
    const auto found = aliases_.find(word.substr(0, end));
    ASSIGN_OR_RETURN(std::string plain, plain_switch(word));
    words.push_back(found == aliases_.end() ? std::move(plain) : str_cat("--", found->second, word.substr(end)));
  }
  std::vector<Pending> from_command_line;
  warn_of_variables();
  RETURN_IF_ERROR(read_arguments(words, from_command_line));
  RETURN_IF_ERROR(read_environment());
  std::string path = lookup("config") != nullptr ? text("config") : "";
  for (const Pending& item : from_command_line)
    if (item.name == "config") path = item.value;
  if (!path.empty()) {
    RETURN_IF_ERROR(read_file(path));
    RETURN_IF_ERROR(read_environment());
  }
  return apply(from_command_line, OptionSource::kCommandLine, "the command line");
}

std::string Options::help() const {
  std::string out =
      str_cat("Usage: ", command_, positional_name_.empty() ? "" : " " + positional_name_, " [flags]\n", summary_,
              "\n\nEach flag is also PERIGEE_<FLAG> in the environment and a key of the --config file.\n");
  std::vector<std::string> groups;
  for (const Option& option : options_)
    if (std::find(groups.begin(), groups.end(), option.group) == groups.end()) groups.push_back(option.group);
  for (const std::string& group : groups) {
    out += str_cat("\n", group, ":\n");
    for (const Option& option : options_) {
      if (option.group != group) continue;
      std::string left = str_cat("  --", option.kind == Kind::kSwitch ? "[no-]" : "", option.name);
      if (left.size() < 38) left.resize(38, ' ');
      const std::string fallback =
          option.values.empty() || option.values[0].empty() ? "" : str_cat(" [", option.values[0], "]");
      out += str_cat(left, " ", option.help, fallback, "\n");
    }
  }
  return out;
}

std::string Options::shown(const Option& option) {
  std::string value;
  for (const std::string& item : option.values)
    value += (value.empty() ? "" : " ") + (is_secret(option.name) && !item.empty() ? std::string("***") : item);
  return str_cat(option.name, ": ", value, " (", source_name(option.source), ")");
}

std::string Options::resolved() const {
  std::string out;
  for (const Option& option : options_) out += shown(option) + "\n";
  return out;
}

std::string Options::resolved_given() const {
  std::string out;
  for (const Option& option : options_)
    if (option.source != OptionSource::kDefault) out += (out.empty() ? "" : "; ") + shown(option);
  return out.empty() ? "none" : out;
}

}  // namespace perigee

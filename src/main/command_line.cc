#include "main/command_line.h"

#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>

#include "base/log.h"
#include "server/spelling.h"

namespace perigee {
namespace {

constexpr const char* kIgnored = "Accepted from vLLM, without effect";
constexpr const char* kVariables = "PERIGEE_";
// Of vLLM's, those with an effect: main/api_keys.h, main/kv_transfer_flags.h.
constexpr std::array<std::string_view, 3> kRead = {"VLLM_API_KEY", "VLLM_NIXL_SIDE_CHANNEL_HOST",
                                                   "VLLM_NIXL_SIDE_CHANNEL_PORT"};

std::string variable_of(std::string name) {
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return kVariables + name;
}

// "--tensor-parallel-size,--tp": tensor-parallel-size.
std::string first_of(const std::string& names) {
  const size_t begin = names.find_first_not_of('-');
  return names.substr(begin, names.find(',') - begin);
}

// "--NAME" as CLI11 writes a flag that also has a negative.
std::string with_no(const std::string& name) {
  return fmt::format("{},!--no-{}", name, first_of(name));
}

const char* value_of_variable(const CLI::Option& option) {
  return std::getenv(option.get_envname().c_str());
}

// A line of --help: "--[no-]NAME" of a switch, the default behind the text.
class HelpLines : public CLI::Formatter {
 public:
  HelpLines() { column_width(38); }
  std::string make_option_name(const CLI::Option* option, bool positional) const override {
    if (option->get_fnames().empty()) return Formatter::make_option_name(option, positional);
    return "--[no-]" + option->get_single_name();
  }
  std::string make_option_opts(const CLI::Option*) const override { return ""; }
  std::string make_option_desc(const CLI::Option* option) const override {
    const std::string shown = option->get_default_str();
    return option->get_description() + (shown.empty() ? "" : fmt::format(" [{}]", shown));
  }
};

}  // namespace

class FlagApp : public CLI::App {
 public:
  using CLI::App::App;

  // Ends parse() from within a callback of CLI11.
  [[noreturn]] void refuse(std::string message, const std::string& field) {
    refusal_ = bad_input(std::move(message), field);
    throw CLI::ValidationError(refusal_->message);
  }
  Error explain(const CLI::ParseError& error) const;
  std::string shown(const CLI::Option& option) const;
  std::string advice(const std::string& name, const char* dashes) const;
  Error unknown_word() const;
  Status check_empty_variables() const;
  void warn_of_variables() const;
  static void log_ignored_variables();

 private:
  std::string source(const CLI::Option& option) const;
  std::string nearest(const std::string& name) const;  // "": none is near
  std::optional<Error> refusal_;                       // why parse() ends, where CLI11 has no words for it
};

namespace {

// The --config file. CLI11 would let it win over the environment, and takes a list for one value: those are left out
// and refused here.
class YamlFile : public CLI::ConfigBase {
 public:
  explicit YamlFile(FlagApp& app) : app_(app) {}
  std::vector<CLI::ConfigItem> from_config(std::istream& stream) const override {
    const auto path = app_.get_config_ptr()->as<std::string>();
    std::vector<CLI::ConfigItem> items;
    try {
      const YAML::Node root = YAML::Load(stream);
      if (!root.IsMap() && !root.IsNull()) app_.refuse(path + ": must be a map of flag names to values", "config");
      for (const auto& entry : root) add(path, entry.first.as<std::string>(), entry.second, items);
    } catch (const YAML::Exception& error) {
      app_.refuse(fmt::format("{}: {}", path, error.what()), "config");
    }
    return items;
  }

 private:
  void add(const std::string& path, const std::string& name, const YAML::Node& value,
           std::vector<CLI::ConfigItem>& items) const {
    const CLI::Option* option = app_.get_option_no_throw("--" + name);
    if (option == nullptr || !option->get_configurable())
      app_.refuse(fmt::format("{} has the unknown key \"{}\"{}", path, name, app_.advice(name, "")), name);
    if (value.IsSequence() && option->get_items_expected_max() <= 1)
      app_.refuse(fmt::format("{}: \"{}\" takes one value, not a list", path, name), name);
    if (value_of_variable(*option) != nullptr) return;
    const auto texts = value.IsSequence() ? value.as<std::vector<std::string>>() : std::vector{value.as<std::string>()};
    items.push_back({.parents = {}, .name = name, .inputs = texts});
  }
  FlagApp& app_;
};

}  // namespace

std::string FlagApp::source(const CLI::Option& option) const {
  const auto& words = parse_order();
  if (option.count() == 0) return "default";
  if (std::find(words.begin(), words.end(), &option) != words.end()) return "command line";
  return value_of_variable(option) != nullptr ? "environment" : "file";
}

// What CLI11 says, or refuse() before it, with where the value came from if that is not the command line.
Error FlagApp::explain(const CLI::ParseError& error) const {
  const std::string what = error.what(), flag = what.substr(0, what.find(':'));
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return bad_input(fmt::format("{0} needs a value ({0} VALUE); see --help", flag), first_of(flag));
  if (dynamic_cast<const CLI::FileError*>(&error) != nullptr)
    return bad_input(fmt::format("--config {} cannot be read", get_config_ptr()->as<std::string>()), "config");
  Error out = refusal_ ? *refusal_ : bad_input(what);
  const CLI::Option* option = get_option_no_throw("--" + out.field);
  if (option == nullptr || option == get_config_ptr()) return out;
  const std::string from = source(*option);
  if (from == "environment") {
    out.message += fmt::format(" (from {})", option->get_envname());
    if (std::string_view(value_of_variable(*option)).starts_with("tcp://"))
      out.message += "; Kubernetes sets it where a service is called perigee: set enableServiceLinks: false in the pod";
  }
  if (from == "file") out.message += fmt::format(" (from {})", get_config_ptr()->as<std::string>());
  return out;
}

std::string FlagApp::shown(const CLI::Option& option) const {
  const std::string& name = option.get_single_name();
  std::string value = option.get_default_str();
  if (option.count() > 0) {
    value = CLI::detail::join(option.reduced_results(), " ");
    const bool secret = name.find("api-key") != std::string::npos || name == "kv-secret";
    if (secret && !value.empty()) value = "***";
  }
  return fmt::format("{}: {} ({})", name, value, source(option));
}

std::string FlagApp::nearest(const std::string& name) const {
  std::vector<std::string_view> names;
  for (const CLI::Option* option : get_options()) names.push_back(option->get_single_name());
  constexpr size_t kBegun = 4;  // letters
  for (const std::string_view known : names)
    if (name.size() >= kBegun && known.starts_with(name)) return std::string(known);
  return std::string(nearest_name(name, names).value_or(""));
}

std::string FlagApp::advice(const std::string& name, const char* dashes) const {
  std::string near = nearest(name);
  if (near.empty())  // the flag that it begins with: "max-model-len" of "max-model-length"
    for (const CLI::Option* option : get_options())
      if (const std::string& known = option->get_single_name(); known.size() > near.size() && name.starts_with(known))
        near = known;
  return near.empty() ? "; leave it out, or see --help" : fmt::format("; did you mean \"{}{}\"?", dashes, near);
}

// What CLI11 did not know what to do with: a flag counts before a word, which may be that flag's value.
Error FlagApp::unknown_word() const {
  const std::vector<std::string> rest = remaining();
  const auto flag = std::find_if(rest.begin(), rest.end(), [](const std::string& word) { return word[0] == '-'; });
  const std::string& word = flag != rest.end() ? *flag : rest.front();
  for (const CLI::Option* option : get_options([](const CLI::Option* each) { return each->get_positional(); }))
    if (flag == rest.end() && option->count() > 0)
      return bad_input(
          fmt::format("more than one {}: {} and {}", option->get_single_name(), option->results()[0], word),
          option->get_single_name());
  const std::string name = word.substr(std::min(word.find_first_not_of('-'), word.size()));
  return bad_input(fmt::format("unknown flag or word \"{}\"{}", word, advice(name.substr(0, name.find('=')), "--")));
}

// CLI11 takes an empty variable for none: of a key, that would open the server.
Status FlagApp::check_empty_variables() const {
  for (const CLI::Option* option : get_options())
    if (const char* value = value_of_variable(*option); value != nullptr && *value == '\0' && option->count() == 0)
      return bad_input(fmt::format("{} is empty: give it a value, or unset it", option->get_envname()),
                       option->get_single_name());
  return {};
}

// Variables that miss a flag's name by little. Others may be other commands'.
void FlagApp::warn_of_variables() const {
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    const std::string_view whole = *each, variable = whole.substr(0, whole.find('='));
    if (!variable.starts_with(kVariables)) continue;
    std::string name(variable.substr(std::string_view(kVariables).size()));
    for (char& c : name) c = c == '_' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (const std::string near = nearest(name); !near.empty() && near != name)
      log_warning(variable, " has no effect; did you mean ", variable_of(near), "?");
  }
}

// Variables of vLLM and NCCL, which people bring along with their launch lines.
void FlagApp::log_ignored_variables() {
  std::string names;
  for (char** each = environ; each != nullptr && *each != nullptr; ++each) {
    const std::string_view whole = *each, variable = whole.substr(0, whole.find('='));
    if (std::find(kRead.begin(), kRead.end(), variable) != kRead.end() ||
        (!variable.starts_with("VLLM_") && !variable.starts_with("NCCL_")))
      continue;
    std::string_view note;
    if (variable == "VLLM_SPECULATIVE_DISABLE_ABOVE_SEQ_LEN") note = " (--speculation-max-context does this)";
    if (variable.starts_with("NCCL_")) note = " (NCCL reads it with --comm nccl)";
    names += fmt::format("{}{}{}", names.empty() ? "" : ", ", variable, note);
  }
  if (!names.empty()) log_info("environment variables without effect: ", names);
}

CommandLine::CommandLine(const std::string& command, const std::string& summary)
    : app_(std::make_unique<FlagApp>(summary, command)) {
  app_->formatter(std::make_shared<HelpLines>());
  app_->allow_extras();
  app_->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app_->footer("Each flag is also PERIGEE_<FLAG> in the environment and, with --config, a key of that file.");
  group("General");
}

CommandLine::~CommandLine() = default;

void CommandLine::group(const std::string& heading) {
  app_->option_defaults()->group(heading);
}

void CommandLine::add_value(const std::string& names, const std::string& help, const std::string& shown,
                            std::function<std::string(const std::string& text)> read) {
  const auto set = [app = app_.get(), name = first_of(names), read = std::move(read)](const CLI::results_t& texts) {
    if (const std::string expected = read(texts.back()); !expected.empty())
      app->refuse(fmt::format("--{} must be {}, not \"{}\"", name, expected, texts.back()), name);
    return true;
  };
  app_->add_option(names, set, help)->default_str(shown);
}

void CommandLine::add_list(const std::string& names, std::vector<std::string>& field, const std::string& help) {
  constexpr int kMost = 64;
  app_->add_option(names, field, help)->expected(1, kMost);
}

void CommandLine::add_switch(const std::string& name, bool& field, const std::string& help) {
  const auto plain = [app = app_.get(), bare = first_of(name)](const std::string& text) -> std::string {
    if (bool on = false; CLI::detail::lexical_cast(text, on)) return on ? "true" : "false";
    app->refuse(fmt::format("--{} is a switch: true or false, not \"{}\"", bare, text), bare);
  };
  app_->add_flag(with_no(name), field, help)->transform(plain)->default_str(field ? "true" : "false");
}

void CommandLine::add_ignored_value(const std::string& name, const std::string& why) {
  app_->add_option(name, CLI::callback_t(), why)->group(kIgnored);
}

void CommandLine::add_ignored_switch(const std::string& name, const std::string& why) {
  app_->add_flag(with_no(name), why)->group(kIgnored);
}

void CommandLine::add_config_file() {
  const char* path = std::getenv("PERIGEE_CONFIG");  // CLI11 looks for the file before it looks at variables
  app_->set_config("--config", path != nullptr ? path : "", "YAML file whose keys are these flags", path != nullptr);
  app_->config_formatter(std::make_shared<YamlFile>(*app_));
}

Status CommandLine::parse(const std::vector<std::string>& words) {
  for (CLI::Option* option : app_->get_options())
    if (option != app_->get_help_ptr()) option->envname(variable_of(option->get_single_name()));
  app_->warn_of_variables();
  std::vector<std::string> reversed(words.rbegin(), words.rend());
  for (std::string& word : reversed)  // -tp=8 as --tp=8: CLI11 knows one dash before one letter only
    if (word.size() > 2 && app_->get_option_no_throw("-" + word.substr(0, word.find('='))) != nullptr)
      word.insert(0, "-");
  try {
    app_->parse(reversed);
  } catch (const CLI::CallForHelp&) {
    return Error(Code::kCancelled, app_->help());
  } catch (const CLI::ParseError& error) {
    return app_->explain(error);
  }
  if (app_->remaining_size() > 0) return app_->unknown_word();
  return app_->check_empty_variables();
}

bool CommandLine::given(const std::string& name) const {
  return app_->get_option("--" + name)->count() > 0;
}

void CommandLine::log_ignored() const {
  for (const CLI::Option* option : app_->get_options())
    if (option->get_group() == kIgnored && option->count() > 0)
      log_info("--", option->get_single_name(), " has no effect: ", option->get_description());
  FlagApp::log_ignored_variables();
}

std::string CommandLine::resolved() const {
  std::string out;
  for (const CLI::Option* option : app_->get_options())
    if (option != app_->get_help_ptr()) out += app_->shown(*option) + "\n";
  return out;
}

std::string CommandLine::resolved_given() const {
  std::string out;
  for (const CLI::Option* option : app_->get_options())
    if (option->count() > 0) out += (out.empty() ? "" : "; ") + app_->shown(*option);
  return out.empty() ? "none" : out;
}

int print_refusal(const std::string& command, const Error& error) {
  const bool help = error.code == Code::kCancelled;
  fmt::print(help ? stdout : stderr, "{}{}\n", help ? "" : command + ": ", error.message);
  return help ? 0 : 2;
}

}  // namespace perigee

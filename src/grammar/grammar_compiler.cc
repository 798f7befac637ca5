#include "grammar/grammar_compiler.h"

#include <fmt/core.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <new>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/json.h"
#include "grammar/regex_grammar.h"
#include "grammar/reply_grammar.h"
#include "grammar/schema_grammar.h"
#include "grammar/structural_tag.h"

namespace perigee {
namespace {

constexpr size_t kMostChoices = 4096;
constexpr size_t kMostTools = 256;
// All of a spec as one text; different specs have different ones, because lengths stand before texts.
std::string key_of(const GrammarSpec& spec) {
  std::string key = std::to_string(static_cast<int>(spec.kind)) + ' ' + std::to_string(static_cast<int>(spec.calls)) +
                    ' ' + (spec.after_reasoning ? '1' : '0');
  const auto append = [&](std::string_view text) {
    key += ' ' + std::to_string(text.size()) + ' ';
    key += text;
  };
  append(spec.text);
  for (const std::string& choice : spec.choices) append(choice);
  key += " tools";
  for (const GrammarSpec::Tool& tool : spec.tools) {
    append(tool.name);
    append(tool.parameters);
  }
  return key;
}

Result<std::string> ebnf_of_choices(const std::vector<std::string>& choices) {
  if (choices.empty()) return Error(Code::kBadInput, "no choice is given");
  if (choices.size() > kMostChoices) return Error(Code::kBadInput, "at most 4,096 choices are allowed");
  std::string body;
  for (const std::string& choice : choices) {
    if (choice.empty()) return Error(Code::kBadInput, "a choice is empty");
    body += (body.empty() ? "" : " | ") + ebnf_literal(choice);
  }
  return "root ::= " + body + "\n";
}

}  // namespace

struct GrammarCompiler::Impl {
  using Compiled = Result<std::shared_ptr<const Constraint>>;
  struct Made {
    std::string key;
    std::shared_ptr<const Constraint> constraint;
    size_t bytes;
  };
  struct Task {
    GrammarSpec spec;
    std::vector<Done> waiting;
  };

  Impl(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends, GrammarCompilerOptions options_in)
      : options(options_in), table(std::make_shared<TokenTable>(std::move(tokenizer), std::move(ends))) {}

  Compiled compile(const GrammarSpec& spec, size_t& bytes);
  Compiled compile_if_memory(const GrammarSpec& spec, size_t& bytes);
  Compiled compile_calls(const GrammarSpec& spec, size_t& bytes);
  Result<std::shared_ptr<const TextGrammar>> text_of(const GrammarSpec& spec);
  void work();
  void keep(const std::string& key, std::shared_ptr<const Constraint> constraint, size_t bytes);
  const Made* find(const std::string& key);

  const GrammarCompilerOptions options;
  const std::shared_ptr<const TokenTable> table;

  std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false;
  std::list<Made> made;  // most recently used first
  std::unordered_map<std::string_view, std::list<Made>::iterator> by_key;
  size_t made_bytes = 0;
  std::unordered_map<std::string, Task> tasks;
  std::deque<std::string> queue;
  std::vector<std::thread> threads;
};

Result<std::shared_ptr<const TextGrammar>> GrammarCompiler::Impl::text_of(const GrammarSpec& spec) {
  using Kind = GrammarSpec::Kind;
  if (spec.text.size() > options.limits.text_bytes)
    return Error(Code::kBadInput, "it has " + std::to_string(spec.text.size()) + " bytes, at most " +
                                      std::to_string(options.limits.text_bytes) + " are allowed");
  if (spec.kind == Kind::kStructuralTag) {
    auto parsed = parse_json(spec.text, {.max_bytes = options.limits.text_bytes, .max_depth = 64});
    if (!parsed.ok()) return Error(Code::kBadInput, parsed.error().message);
    auto tag = with_own_grammars(*parsed);
    if (!tag.ok()) return tag.error();
    GrammarLimits limits = options.limits;
    limits.text_bytes *= 4;  // what a text becomes is larger than it
    return TextGrammar::compile_structural_tag(table, dump_json(*tag), limits);
  }
  if (spec.kind == Kind::kEbnf) RETURN_IF_ERROR(TextGrammar::check_ebnf(spec.text));
  Result<std::string> ebnf = spec.kind == Kind::kJsonObject   ? Result<std::string>(json_object_grammar())
                             : spec.kind == Kind::kJsonSchema ? schema_grammar(spec.text)
                             : spec.kind == Kind::kRegex      ? regex_grammar(spec.text)
                             : spec.kind == Kind::kChoice     ? ebnf_of_choices(spec.choices)
                                                              : Result<std::string>(spec.text);
  if (!ebnf.ok()) return ebnf.error();
  GrammarLimits limits = options.limits;
  limits.text_bytes *= 4;  // what a text becomes is larger than it
  // JSON says where a value ends, so the ways to read it do not multiply along the text.
  if (spec.kind == Kind::kJsonSchema) limits.row_states *= 8;
  return TextGrammar::compile(table, *ebnf, limits);
}

Result<std::shared_ptr<const Constraint>> GrammarCompiler::Impl::compile_calls(const GrammarSpec& spec, size_t& bytes) {
  if (spec.tools.size() > kMostTools) return Error(Code::kBadInput, "tools: at most 256 are allowed");
  std::vector<ReplyGrammar::Tool> tools;
  std::unordered_map<std::string_view, std::shared_ptr<const TextGrammar>> known;  // by schema
  const auto began = std::chrono::steady_clock::now();
  for (size_t i = 0; i < spec.tools.size(); ++i) {
    const std::string place = fmt::format("tools[{}]/parameters", i);
    auto& same = known[spec.tools[i].parameters];
    if (same != nullptr) {
      tools.push_back({spec.tools[i].name, same, {}});
      continue;
    }
    if (!tools.empty() && std::chrono::steady_clock::now() - began > options.tools_time)
      return Error(Code::kBadInput,
                   fmt::format("tools: their schemas take over {} s to compile; declare fewer or smaller",
                               options.tools_time.count()));
    GrammarSpec arguments;
    arguments.kind = GrammarSpec::Kind::kJsonSchema;
    arguments.text = spec.tools[i].parameters;
    if (arguments.text.empty()) arguments.kind = GrammarSpec::Kind::kJsonObject;
    auto text = text_of(arguments);
    if (!text.ok()) {
      const std::string& why = text.error().message;
      const std::string_view inside = std::string_view(why).substr(why.starts_with("/:") ? 1 : 0);
      const bool has_place = inside.starts_with("/") || inside.starts_with(":");
      return Error(text.error().code, fmt::format("{}{}{}", place, has_place ? "" : ": ", inside));
    }
    bytes += (*text)->bytes();
    same = *std::move(text);
    tools.push_back({spec.tools[i].name, same, {}});
  }
  return ReplyGrammar::of_calls(table, std::move(tools), spec.calls, spec.after_reasoning);
}

Result<std::shared_ptr<const Constraint>> GrammarCompiler::Impl::compile(const GrammarSpec& spec, size_t& bytes) {
  if (spec.kind == GrammarSpec::Kind::kToolCalls) return compile_calls(spec, bytes);
  auto text = text_of(spec);
  if (!text.ok()) return text.error();
  bytes += (*text)->bytes();
  return ReplyGrammar::of_text(table, *std::move(text), spec.after_reasoning);
}

// An exception would end the thread's process.
GrammarCompiler::Impl::Compiled GrammarCompiler::Impl::compile_if_memory(const GrammarSpec& spec, size_t& bytes) {
  try {
    return compile(spec, bytes);
  } catch (const std::bad_alloc&) {
    return Error(Code::kUnavailable, "not enough memory to compile it");
  } catch (const std::exception& error) {
    return bad_input(fmt::format("it cannot be compiled: {}", error.what()));
  }
}

const GrammarCompiler::Impl::Made* GrammarCompiler::Impl::find(const std::string& key) {
  const auto known = by_key.find(key);
  if (known == by_key.end()) return nullptr;
  made.splice(made.begin(), made, known->second);
  return &made.front();
}

void GrammarCompiler::Impl::keep(const std::string& key, std::shared_ptr<const Constraint> constraint, size_t bytes) {
  constexpr size_t kOwnBytes = 4096;  // of the entry, and what the counts of others leave out
  try {
    made.push_front({key, std::move(constraint), bytes + 2 * key.size() + kOwnBytes});
    by_key[made.front().key] = made.begin();
  } catch (const std::bad_alloc&) {  // the next request compiles it anew
    if (!made.empty() && !by_key.contains(made.front().key)) made.pop_front();
    return;
  }
  made_bytes += made.front().bytes;
  while (made_bytes > options.cache_bytes && !made.empty()) {
    made_bytes -= made.back().bytes;
    by_key.erase(made.back().key);
    made.pop_back();
  }
}

void GrammarCompiler::Impl::work() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return stopping || !queue.empty(); });
    if (stopping) return;
    const std::string key = std::move(queue.front());
    queue.pop_front();
    const GrammarSpec spec = std::move(tasks.at(key).spec);
    lock.unlock();
    size_t bytes = 0;
    const Compiled compiled = compile_if_memory(spec, bytes);
    lock.lock();
    if (compiled.ok()) keep(key, *compiled, bytes);
    std::vector<Done> waiting = std::move(tasks.at(key).waiting);
    tasks.erase(key);
    lock.unlock();
    for (Done& done : waiting) done(compiled);
    waiting.clear();
    lock.lock();
  }
}

GrammarCompiler::GrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, std::vector<int32_t> ends,
                                 GrammarCompilerOptions options)
    : impl_(std::make_unique<Impl>(std::move(tokenizer), std::move(ends), options)) {
  for (int i = 0; i < options.threads; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->work(); });
}

GrammarCompiler::~GrammarCompiler() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
  for (auto& [key, task] : impl_->tasks)
    for (Done& done : task.waiting) done(Error(Code::kCancelled, "the server is stopping"));
}

void GrammarCompiler::compile(GrammarSpec spec, Done done) {
  const std::string key = key_of(spec);
  std::shared_ptr<const Constraint> known;
  {
    std::lock_guard lock(impl_->mutex);
    if (const Impl::Made* made = impl_->find(key)) {
      known = made->constraint;
    } else if (const auto task = impl_->tasks.find(key); task != impl_->tasks.end()) {
      task->second.waiting.push_back(std::move(done));
      return;
    } else if (impl_->queue.size() < impl_->options.max_waiting) {
      impl_->tasks[key] = {std::move(spec), {}};
      impl_->tasks[key].waiting.push_back(std::move(done));
      impl_->queue.push_back(key);
      impl_->changed.notify_one();
      return;
    }
  }
  if (known != nullptr) return done(known);
  done(Error(Code::kUnavailable, "too many schemas and grammars are being compiled: try again later"));
}

Result<std::shared_ptr<const Constraint>> GrammarCompiler::compile_now(const GrammarSpec& spec) {
  size_t bytes = 0;
  return impl_->compile(spec, bytes);
}

size_t GrammarCompiler::cached_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->made_bytes;
}

}  // namespace perigee

// TemplateValue: what an expression of a chat template is worth.
//
// The Python values that templates can hold, immutable and shared; only a namespace changes. Containers know how deep
// they nest, so that a value can be walked and freed without deep recursion. Creating values that cost memory is the
// job of TemplateMachine (text/jinja/machine.h), which counts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace perigee {

class TemplateValue;
struct TemplateMacro;

using TemplateValues = std::vector<TemplateValue>;

// A list, or something that iterates like one. Python's lazy iterators and views are made at once, and the kind says
// in which ways they still differ from a list.
struct TemplateSequence {
  enum class Kind { kList, kTuple, kRange, kIterator, kView };
  Kind kind = Kind::kList;
  TemplateValues items;
  int nesting = 0;
};

struct TemplateDict {
  std::vector<std::pair<TemplateValue, TemplateValue>> entries;  // in order of insertion
  int nesting = 0;
};

// The `loop` variable. The list lives as long as the value, the position is that of the running loop.
struct TemplateLoop {
  std::shared_ptr<const TemplateSequence> sequence;
  size_t index0 = 0;
  std::unique_ptr<TemplateValues> last_changed;
};

// Owned by the machine, so that a namespace that holds itself does not leak.
struct TemplateNamespace {
  std::vector<std::pair<std::string, TemplateValue>> attributes;
};

// A number that neither int64 nor double holds, with the text it came in.
struct TemplateNumber {
  TemplateNumber(std::string digits, double value, bool is_integral)
      : text(std::move(digits)), nearest(value), integral(is_integral) {}

  std::string text;
  double nearest;
  bool integral;
};

enum class TemplateFunction { kRange, kNamespace, kDict, kRaiseException, kStrftimeNow };

class TemplateValue {
 public:
  struct Undefined {};
  struct None {};
  using String = std::shared_ptr<const std::string>;
  using Sequence = std::shared_ptr<const TemplateSequence>;
  using Dict = std::shared_ptr<const TemplateDict>;
  using Loop = std::shared_ptr<TemplateLoop>;
  using Number = std::shared_ptr<const TemplateNumber>;

  TemplateValue() = default;  // undefined
  TemplateValue(None) : value_(None{}) {}
  explicit TemplateValue(bool value) : value_(value) {}
  explicit TemplateValue(int64_t value) : value_(value) {}
  explicit TemplateValue(double value) : value_(value) {}
  explicit TemplateValue(String value) : value_(std::move(value)) {}
  explicit TemplateValue(Sequence value) : value_(std::move(value)) {}
  explicit TemplateValue(Dict value) : value_(std::move(value)) {}
  explicit TemplateValue(Loop value) : value_(std::move(value)) {}
  explicit TemplateValue(TemplateNamespace* value) : value_(value) {}
  explicit TemplateValue(const TemplateMacro* value) : value_(value) {}
  explicit TemplateValue(TemplateFunction value) : value_(value) {}
  explicit TemplateValue(Number value) : value_(std::move(value)) {}

  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(value_);
  }
  template <typename T>
  const T& as() const {
    return std::get<T>(value_);
  }

  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  bool is_bool() const { return is<bool>(); }
  bool is_string() const { return is<String>(); }
  bool is_sequence() const { return is<Sequence>(); }
  bool is_list() const { return is_sequence() && sequence().kind == TemplateSequence::Kind::kList; }
  bool is_dict() const { return is<Dict>(); }
  // A Python int that fits 64 bits; True is one. Arithmetic takes every other number as a double.
  bool is_integral() const { return is_bool() || is<int64_t>(); }
  bool is_number() const { return is_integral() || is<double>() || is<Number>(); }
  // Whether Python could index it by position: a list, tuple or range.
  bool is_indexable() const;
  const char* type_name() const;  // as Python calls it

  // Each requires the matching is_...().
  const std::string& string() const { return *as<String>(); }
  const TemplateSequence& sequence() const { return *as<Sequence>(); }
  const TemplateValues& items() const { return sequence().items; }
  const TemplateDict& dict() const { return *as<Dict>(); }
  int64_t integer() const { return is_bool() ? as<bool>() : as<int64_t>(); }
  double number() const {
    if (is_integral()) return static_cast<double>(integer());
    return is<Number>() ? as<Number>()->nearest : as<double>();
  }

  bool truthy() const;
  int nesting() const;  // 0 for scalars

 private:
  std::variant<Undefined, None, bool, int64_t, double, String, Sequence, Dict, Loop, TemplateNamespace*,
               const TemplateMacro*, TemplateFunction, Number>
      value_;
};

}  // namespace perigee

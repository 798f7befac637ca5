// The filters, tests, methods and functions that chat templates may call.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/machine.h"

namespace perigee {

struct TemplateArguments {
  TemplateValues positional;  // of a filter, test or method: the subject first
  std::vector<std::pair<std::string, TemplateValue>> named;
};

using TemplateBuiltin = TemplateValue (*)(TemplateMachine&, const TemplateArguments&);

// Null for a name that does not exist. A test gives a bool.
TemplateBuiltin find_template_filter(std::string_view name);
TemplateBuiltin find_template_test(std::string_view name);

// object.method(arguments); `arguments` starts with the object. Fails for anything but the known methods of strings,
// lists, dicts and loops; a list or a dict has none that changes it.
TemplateValue call_template_method(TemplateMachine& machine, std::string_view method,
                                   const TemplateArguments& arguments);

// range, namespace, dict, raise_exception; strftime_now needs the context and is the renderer's.
TemplateValue call_template_function(TemplateMachine& machine, TemplateFunction function,
                                     const TemplateArguments& arguments);

// object[key], and object.key for a string key: undefined when there is none. Fails when the object is undefined.
TemplateValue get_template_item(TemplateMachine& machine, const TemplateValue& object, const TemplateValue& key);
TemplateValue get_template_attribute(TemplateMachine& machine, const TemplateValue& object, std::string_view name);

// object[start:stop:step]; None stands for a bound that is not given.
struct TemplateSlice {
  TemplateValue start, stop, step;
};
TemplateValue slice_template_value(TemplateMachine& machine, const TemplateValue& object, const TemplateSlice& slice);

// The arguments of one call put in the order of its parameters.
class BoundArguments {
 public:
  // Fails when a parameter of the first `required` is missing, or an argument has no parameter.
  BoundArguments(TemplateMachine& machine, const TemplateArguments& arguments,
                 std::initializer_list<std::string_view> parameters, size_t required);
  bool ok() const { return ok_; }
  // The argument, or null when it was not given; valid as long as the arguments are.
  const TemplateValue* operator[](size_t index) const { return values_[index]; }
  // The argument, or undefined.
  TemplateValue value(size_t index) const { return values_[index] ? *values_[index] : TemplateValue(); }
  bool truthy(size_t index, bool otherwise) const { return values_[index] ? values_[index]->truthy() : otherwise; }

 private:
  std::vector<const TemplateValue*> values_;
  bool ok_ = true;
};

}  // namespace perigee

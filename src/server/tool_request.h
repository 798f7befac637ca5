// The tools of a chat request: those that it declares, at its top and inside system messages, and which the reply
// calls.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "server/request_fields.h"

namespace perigee {

struct DeclaredTool {
  std::string name;
  std::string parameters;  // the JSON schema of its arguments; "" when it has none
  bool strict = false;
  std::string where;  // "tools[2]" or "messages[0].tools[1]"
};

class DeclaredTools {
 public:
  explicit DeclaredTools(const RequestCaps& caps) : caps_(caps) {}

  enum class Place {
    kRequest,
    kMessage,  // Kimi's own API has stricter rules there: `type` is required, names begin with a letter or '_'
  };
  // Checks the array `tools`, a member of the name `where`, and takes its entries. Names differ in the whole request.
  // Errors: kBadInput.
  Status add(const Json& tools, const std::string& where, Place place);

  std::vector<DeclaredTool> take() && { return std::move(tools_); }

 private:
  Result<DeclaredTool> read(const Json& tool, const std::string& field, const std::string& where, Place place) const;

  const RequestCaps& caps_;
  std::vector<DeclaredTool> tools_;
  std::unordered_set<std::string> names_;
};

struct ToolChoice {
  enum class Kind { kNone, kAuto, kRequired, kNamed };
  Kind kind = Kind::kAuto;
  std::string name;  // kNamed
  bool is_forced() const { return kind == Kind::kRequired || kind == Kind::kNamed; }
};

// `value` is tool_choice. Errors: kBadInput for another value, for a call that is wanted where no tool is declared, and
// for a name that is not declared.
Result<ToolChoice> read_tool_choice(const Json& value, const std::vector<DeclaredTool>& tools);

}  // namespace perigee

#include "server/tool_request.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>

#include "base/utf8.h"

namespace perigee {

namespace {

bool is_tool_name(const std::string& name, const RequestCaps& caps, DeclaredTools::Place place) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-' || c == '.'; };
  const auto may_begin = [&](unsigned char c) {
    return place == DeclaredTools::Place::kRequest || std::isalpha(c) || c == '_';
  };
  return !name.empty() && name.size() <= caps.max_tool_name_bytes && may_begin(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), allowed);
}

}  // namespace

Result<DeclaredTool> DeclaredTools::read(const Json& tool, const std::string& field, const std::string& where,
                                         Place place) const {
  if (!tool.is_object()) return bad_input(where + " must be an object", field);
  Fields fields(tool, where + ".");
  const auto type = fields.choice("type", {"function"});
  if (!type && place == Place::kMessage) fields.fail("type", "must be \"function\"");
  const Json* function = fields.object("function");
  fields.unknown();
  RETURN_IF_ERROR(fields.status());
  const Json* name = function == nullptr ? nullptr : function->find("name");
  if (name == nullptr || !name->is_string() || !is_tool_name(name->as_string(), caps_, place))
    return bad_input(
        fmt::format("{} needs a function.name of 1 to {} letters, digits, '_', '-' or '.'{}", where,
                    caps_.max_tool_name_bytes, place == Place::kMessage ? ", the first of them a letter or '_'" : ""),
        field);
  Fields members(*function, where + ".function.");
  members.any("name");
  const Json* parameters = members.object("parameters");
  members.text("description", caps_.max_tool_schema_bytes);
  DeclaredTool out;
  out.strict = members.flag("strict", false);
  members.unknown();  // others are part of the declaration that the model reads
  RETURN_IF_ERROR(members.status());
  if (dump_json(tool).size() > caps_.max_tool_schema_bytes)
    return bad_input(fmt::format("{} must be at most {} bytes", where, caps_.max_tool_schema_bytes), field);
  out.name = name->as_string();
  if (parameters != nullptr) {
    Json schema = *parameters;
    const Json* given = schema.find("type");
    for (const char* other : {"array", "boolean", "integer", "null", "number", "string"})
      if (given != nullptr && *given == Json(other))
        return bad_input(fmt::format("{}.function.parameters.type must be \"object\": arguments are an object", where),
                         field);
    const auto takes_objects = [](const Json& type) {
      const Json::Array& types = type.as_array();
      return std::find(types.begin(), types.end(), Json("object")) != types.end();
    };
    // Arguments are an object, though the schema would take others.
    if (given == nullptr || (given->is_array() && takes_objects(*given))) schema.set("type", "object");
    out.parameters = dump_json(schema);
  }
  out.where = where;
  return out;
}

Status DeclaredTools::add(const Json& tools, const std::string& where, Place place) {
  const size_t room = caps_.max_tools - tools_.size();
  if (!tools.is_array() || tools.as_array().empty() || tools.as_array().size() > room)
    return bad_input(
        fmt::format("{} must be an array of 1 to {} tools; leave it out for none{}", where, caps_.max_tools,
                    tools_.empty() ? "" : fmt::format(" ({} are declared already)", tools_.size())),
        where);
  for (size_t i = 0; i < tools.as_array().size(); ++i) {
    ASSIGN_OR_RETURN(DeclaredTool tool, read(tools.as_array()[i], where, fmt::format("{}[{}]", where, i), place));
    if (!names_.insert(tool.name).second)
      return bad_input(fmt::format("{} has the function {} twice; names must differ", where, tool.name), where);
    tools_.push_back(std::move(tool));
  }
  return {};
}

Result<ToolChoice> read_tool_choice(const Json& value, const std::vector<DeclaredTool>& tools) {
  constexpr const char* kField = "tool_choice";
  if (value == Json("auto")) return ToolChoice();
  if (value == Json("none")) return ToolChoice{ToolChoice::Kind::kNone, ""};
  const bool required = value == Json("required");
  const Json* function = value.find("function");
  const Json* type = value.find("type");
  const Json* name = function == nullptr ? nullptr : function->find("name");
  const bool named = name != nullptr && name->is_string() && (type == nullptr || *type == Json("function"));
  if (!required && !named)
    return bad_input(
        "tool_choice must be \"auto\", \"none\", \"required\" or "
        "{\"type\": \"function\", \"function\": {\"name\": ...}}",
        kField);
  if (tools.empty())
    return bad_input("tool_choice asks for a call, but the request declares no tools; add tools", kField);
  if (required) return ToolChoice{ToolChoice::Kind::kRequired, ""};
  const auto is_meant = [&](const DeclaredTool& tool) { return tool.name == name->as_string(); };
  if (std::none_of(tools.begin(), tools.end(), is_meant))
    return bad_input(fmt::format("tool_choice names the function '{}', which tools does not declare",
                                 excerpt(name->as_string(), 64)),
                     kField);
  return ToolChoice{ToolChoice::Kind::kNamed, name->as_string()};
}

}  // namespace perigee

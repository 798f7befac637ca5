#include "text/tool_declarations.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace perigee {
namespace {

constexpr std::string_view kStep = "  ";
constexpr std::string_view kDefinitionPrefix = "#/$defs/";
constexpr std::string_view kRootInterface = "parameters";

// A scalar as Python's str() prints it; nullopt for arrays and objects.
std::optional<std::string> python_text(const Json& value) {
  if (value.is_null()) return "None";
  if (value.is_bool()) return value.as_bool() ? "True" : "False";
  if (value.is_string()) return value.as_string();
  if (value.is_number()) return dump_json(value);
  return std::nullopt;
}

std::vector<std::string_view> constraint_keys(std::string_view type) {
  if (type == "string") return {"maxLength", "minLength", "pattern"};
  if (type == "number" || type == "integer") return {"maximum", "minimum"};
  if (type == "array") return {"maxItems", "minItems"};
  return {};
}

// An integer of any size.
bool is_whole(const Json& value) {
  const std::string* digits = value.digits();
  return value.is_int() || (digits != nullptr && digits->find_first_of(".eE") == std::string::npos);
}

bool matches_type(const Json& value, std::string_view type) {
  if (type == "string") return value.is_string();
  // A Python bool is an int, so the original writer lets True stand among numbers.
  if (type == "number") return value.is_number() || value.is_bool();
  if (type == "integer") return is_whole(value) || value.is_bool();
  if (type == "boolean") return value.is_bool();
  if (type == "null") return value.is_null();
  return true;
}

// Writes one function. A schema that cannot be expressed sets failed(); the text is then meaningless.
class FunctionWriter {
 public:
  explicit FunctionWriter(size_t& work) : work_(work) {}
  std::string write(const Json& function);
  bool failed() const { return failed_; }

 private:
  struct Field {
    std::string_view name;
    const Json* schema;
    bool optional;
  };

  std::string fail() {
    failed_ = true;
    return {};
  }
  std::string type_text(const Json& schema, const std::string& indent);
  std::string named_type(const Json& schema, const Json& type, const std::string& indent);
  std::string type_list(const Json& types);
  std::string reference(const Json& target);
  std::string any_of(const Json& options, const std::string& indent);
  std::string enumeration(const Json& schema, const Json& values);
  std::string array(const Json& schema, const std::string& indent);
  std::string object(const Json& schema, const std::string& indent);
  std::string root_interface(const Json& schema);
  std::string definition(const std::string& name, const Json& schema);
  std::string field_text(const Field& field, const std::string& indent);
  std::string additional_text(const Json& additional, const std::string& indent);
  std::string comments(const Json& schema, const std::string& indent);
  std::string description_lines(const Json& schema, const std::string& indent);
  std::vector<Field> fields_of(const Json& schema);
  void note_definitions(const Json& schema);

  // Text that is about to be copied into what encloses it. Nested schemas are copied once a level and indented by it,
  // so that a small schema can be a large text: over the cap it fails.
  std::string spend(std::string text) {
    work_ += text.size();
    return work_ <= kMaxDeclarationWork ? std::move(text) : fail();
  }

  size_t& work_;
  bool failed_ = false;
  bool refers_to_root_ = false;
  std::vector<std::pair<std::string, const Json*>> definitions_;  // in order of first sight
  std::unordered_map<std::string, size_t> definition_index_;
  std::vector<std::string> references_;
};

std::string FunctionWriter::description_lines(const Json& schema, const std::string& indent) {
  const Json* description = schema.find("description");
  if (!description || description->is_null()) return {};
  if (!description->is_string()) return fail();
  if (description->as_string().empty()) return {};
  std::string out;
  std::string_view rest = description->as_string();
  while (true) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    if (!line.empty()) out.append(indent).append("// ").append(line);
    out += '\n';
    if (end == std::string_view::npos) return spend(std::move(out));
    rest.remove_prefix(end + 1);
  }
}

std::string FunctionWriter::comments(const Json& schema, const std::string& indent) {
  std::string out = description_lines(schema, indent);
  const Json* type = schema.find("type");
  const bool composed = schema.find("$ref") || schema.find("anyOf") || schema.find("enum");
  if (composed || !type || !type->is_string()) return out;
  std::string line;
  for (const std::string_view key : constraint_keys(type->as_string())) {
    const Json* value = schema.find(key);
    if (!value) continue;
    const auto text = python_text(*value);
    if (!text) return fail();
    if (!line.empty()) line += ", ";
    line.append(key).append(": ").append(*text);
  }
  if (!line.empty()) out.append(indent).append("// ").append(line).append("\n");
  return out;
}

std::string FunctionWriter::type_text(const Json& schema, const std::string& indent) {
  if (failed_) return {};
  if (schema.is_bool()) return schema.as_bool() ? "any" : "null";
  if (!schema.is_object()) return fail();
  if (schema.as_object().empty()) return "any";
  if (const Json* target = schema.find("$ref")) return reference(*target);
  if (const Json* options = schema.find("anyOf")) return any_of(*options, indent);
  if (const Json* values = schema.find("enum")) return enumeration(schema, *values);
  if (const Json* type = schema.find("type")) return named_type(schema, *type, indent);
  return fail();
}

std::string FunctionWriter::named_type(const Json& schema, const Json& type, const std::string& indent) {
  if (type.is_array()) return type_list(type);
  if (!type.is_string()) return fail();
  const std::string& name = type.as_string();
  if (name == "object") return object(schema, indent);
  if (name == "array") return array(schema, indent);
  return name == "integer" ? "number" : name;
}

std::string FunctionWriter::type_list(const Json& types) {
  std::string out;
  for (const Json& type : types.as_array()) {
    if (!type.is_string()) return fail();
    const std::string& name = type.as_string();
    if (!out.empty()) out += " | ";
    out += name == "object" ? "{}" : name == "array" ? "Array<any>" : name == "integer" ? "number" : name;
  }
  return out;
}

std::string FunctionWriter::reference(const Json& target) {
  if (!target.is_string()) return fail();
  const std::string& text = target.as_string();
  if (text == "#") {
    refers_to_root_ = true;
    return std::string(kRootInterface);
  }
  if (!text.starts_with(kDefinitionPrefix)) return fail();
  references_.push_back(text.substr(kDefinitionPrefix.size()));
  return references_.back();
}

std::string FunctionWriter::any_of(const Json& options, const std::string& indent) {
  if (!options.is_array()) return fail();
  std::string out;
  for (const Json& option : options.as_array()) {
    if (!out.empty()) out += " | ";
    out += type_text(option, indent);
  }
  return spend(std::move(out));
}

std::string FunctionWriter::enumeration(const Json& schema, const Json& values) {
  if (!values.is_array()) return fail();
  std::string_view declared;
  bool nullable = false;
  const Json* type = schema.find("type");
  if (type && type->is_string()) declared = type->as_string();
  if (type && type->is_array() && type->as_array().size() == 2) {
    for (const Json& name : type->as_array()) {
      if (!name.is_string()) return fail();
      if (name.as_string() == "null") {
        nullable = true;
      } else {
        declared = name.as_string();
      }
    }
    if (!nullable) return fail();
  }
  std::string out;
  for (const Json& value : values.as_array()) {
    if (!(nullable && value.is_null()) && !matches_type(value, declared)) return fail();
    const auto text = python_text(value);
    if (!text) return fail();
    if (!out.empty()) out += " | ";
    out += value.is_string() ? "\"" + *text + "\"" : *text;
  }
  return out;
}

std::string FunctionWriter::array(const Json& schema, const std::string& indent) {
  const Json* items = schema.find("items");
  if (!items) return "Array<any>";
  const std::string inner = indent + std::string(kStep);
  const std::string notes = items->is_object() ? comments(*items, inner) : "";
  if (notes.empty()) return spend("Array<" + type_text(*items, indent) + ">");
  return spend("Array<\n" + notes + inner + type_text(*items, inner) + "\n" + indent + ">");
}

std::string FunctionWriter::object(const Json& schema, const std::string& indent) {
  const std::string inner = indent + std::string(kStep);
  std::vector<Field> fields = fields_of(schema);
  std::stable_partition(fields.begin(), fields.end(), [](const Field& field) { return !field.optional; });
  std::string body;
  for (const Field& field : fields) {
    if (!body.empty()) body += ",\n";
    body += field_text(field, inner);
  }
  const Json* additional = schema.find("additionalProperties");
  if (additional && !additional->is_null()) {
    if (!body.empty()) body += ",\n";
    body += additional_text(*additional, inner);
  }
  return body.empty() ? "{}" : "{\n" + body + "\n" + indent + "}";
}

std::string FunctionWriter::additional_text(const Json& additional, const std::string& indent) {
  const bool never = additional.is_bool() && !additional.as_bool();
  return spend(indent + "[k: string]: " + (never ? "never" : type_text(additional, indent)));
}

// The properties by name (the schema is deep-sorted), each with whether it may be left out.
std::vector<FunctionWriter::Field> FunctionWriter::fields_of(const Json& schema) {
  note_definitions(schema);
  std::vector<Field> fields;
  const Json* properties = schema.find("properties");
  if (!properties) return fields;
  const Json* required = schema.find("required");
  if (!properties->is_object() || (required && !required->is_array())) {
    failed_ = true;
    return fields;
  }
  std::unordered_set<std::string_view> needed;
  if (required)
    for (const Json& name : required->as_array())
      if (name.is_string()) needed.insert(name.as_string());
  for (const auto& [name, body] : properties->as_object()) fields.push_back({name, &body, !needed.contains(name)});
  return fields;
}

std::string FunctionWriter::field_text(const Field& field, const std::string& indent) {
  std::string out;
  if (field.schema->is_object()) out = comments(*field.schema, indent);
  const Json* initial = field.schema->find("default");
  if (initial && !initial->is_null()) {
    const bool plain = initial->is_number() || initial->is_bool();
    out += indent + "// Default: " + (plain ? *python_text(*initial) : dump_json(*initial, JsonStyle::kSpaced)) + "\n";
  }
  out.append(indent).append(field.name).append(field.optional ? "?: " : ": ");
  return spend(out + type_text(*field.schema, indent));
}

void FunctionWriter::note_definitions(const Json& schema) {
  const Json* definitions = schema.find("$defs");
  if (!definitions) return;
  if (!definitions->is_object()) {
    failed_ = true;
    return;
  }
  for (const auto& [name, body] : definitions->as_object()) {
    const auto [at, is_new] = definition_index_.emplace(name, definitions_.size());
    if (is_new) {
      definitions_.emplace_back(name, &body);
    } else {
      definitions_[at->second].second = &body;
    }
  }
}

// Unlike an object type it keeps the order of names, required or not, and leaves additionalProperties out.
std::string FunctionWriter::root_interface(const Json& schema) {
  std::string body;
  for (const Field& field : fields_of(schema)) {
    if (!body.empty()) body += ",\n";
    body += field_text(field, std::string(kStep));
  }
  if (!body.empty()) body = "\n" + body + "\n";
  return "interface " + std::string(kRootInterface) + " {" + body + "}\n";
}

std::string FunctionWriter::definition(const std::string& name, const Json& schema) {
  std::string out = schema.is_object() ? description_lines(schema, "") : "";
  return out + "interface " + name + " " + type_text(schema, "") + "\n";
}

std::string FunctionWriter::write(const Json& function) {
  const Json* name = function.find("name");
  if (!name || !name->is_string()) return fail();
  const Json nothing{Json::Object{}};
  const Json* parameters = function.find("parameters");
  if (!parameters || parameters->is_null()) parameters = &nothing;
  if (!parameters->is_object()) return fail();
  std::string type = object(*parameters, "");
  std::string out;
  if (refers_to_root_) {
    out += root_interface(*parameters);
    type = kRootInterface;
  }
  const auto known = definitions_;  // only those of the parameters: a definition's own $defs are not declared
  for (const auto& [defined, schema] : known) out += definition(defined, *schema);
  for (const std::string& used : references_)
    if (!definition_index_.contains(used)) return fail();
  out += description_lines(function, "");
  return out + "type " + name->as_string() + " = (_: " + type + ") => any;\n";
}

std::optional<std::string> typescript(const Json& tools) {
  std::string body;
  size_t work = 0;
  if (!tools.is_array()) return std::nullopt;
  for (const Json& tool : tools.as_array()) {
    const Json* type = tool.find("type");
    if (!type || !type->is_string()) return std::nullopt;
    if (type->as_string() != "function") continue;
    const Json* function = tool.find("function");
    if (!function) return std::nullopt;
    FunctionWriter writer(work);
    body += writer.write(*function);
    if (writer.failed()) return std::nullopt;
  }
  if (body.empty()) return std::nullopt;
  return "# Tools\n\n## functions\nnamespace functions {\n" + body + "}\n";
}

}  // namespace

Json deep_sorted(const Json& value) {
  if (value.is_array()) {
    Json::Array items;
    items.reserve(value.as_array().size());
    for (const Json& item : value.as_array()) items.push_back(deep_sorted(item));
    return items;
  }
  if (!value.is_object()) return value;
  Json::Object members;
  members.reserve(value.as_object().size());
  for (const auto& [key, member] : value.as_object()) members.emplace_back(key, deep_sorted(member));
  const auto by_key = [](const Json::Member& a, const Json::Member& b) { return a.first < b.first; };
  std::sort(members.begin(), members.end(), by_key);
  return members;
}

std::string declare_tools(const Json& tools) {
  const Json sorted = deep_sorted(tools);
  if (auto text = typescript(sorted)) return *std::move(text);
  return dump_json(sorted);
}

}  // namespace perigee

#include "server/output_format.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "grammar/schema_grammar.h"

namespace perigee {

namespace {

using Kind = GrammarSpec::Kind;

// Collects the forms that are asked for; the second one is a fault.
class Forms {
 public:
  explicit Forms(Fields& fields) : fields_(fields) {}

  void add(const std::string& field, GrammarSpec spec) {
    if (found_) return fields_.fail(field, fmt::format("and {} exclude each other; send one of them", found_->field));
    found_ = OutputFormat{std::move(spec), field};
  }
  void add(const std::string& field, Kind kind, std::string text) {
    add(field, {.kind = kind, .text = std::move(text)});
  }

  std::optional<OutputFormat> take() && { return fields_.ok() ? std::move(found_) : std::nullopt; }

 private:
  Fields& fields_;
  std::optional<OutputFormat> found_;
};

// A JSON schema or a structural tag: an object, or its text.
std::optional<std::string> json_text(Fields& fields, std::string_view name, size_t max_bytes) {
  const Json* value = fields.any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_object()) return dump_json(*value);
  if (!value->is_string()) {
    fields.fail(name, fmt::format("must be an object or a string of JSON, got a value of type {}", value->type_name()));
    return std::nullopt;
  }
  return fields.text(name, max_bytes);
}

std::optional<GrammarSpec> choices(Fields& fields, std::string_view name, const RequestCaps& caps) {
  const Json* list = fields.array(name, caps.max_grammar_choices);
  if (list == nullptr) return std::nullopt;
  GrammarSpec spec{.kind = Kind::kChoice};
  for (const Json& choice : list->as_array()) {
    if (!choice.is_string() || choice.as_string().empty()) {
      fields.fail(name, "must hold strings that are not empty");
      return std::nullopt;
    }
    spec.choices.push_back(choice.as_string());
  }
  if (!spec.choices.empty()) return spec;
  fields.fail(name, "must hold at least one string; leave it out for none");
  return std::nullopt;
}

void read_json_schema(Fields& format, const RequestCaps& caps, Forms& out) {
  const std::string where = "response_format.json_schema";
  const Json* given = format.object("json_schema");
  if (given == nullptr) return format.fail("json_schema", "is required beside the type \"json_schema\"");
  Fields members(*given, where + ".");
  const auto name = members.text("name", caps.max_string_bytes);
  if (!name || name->empty()) members.fail("name", "is required: a string that is not empty");
  members.text("description", caps.max_tool_schema_bytes);
  members.flag("strict", true);  // the schema holds either way
  const Json* schema = members.object("schema");
  if (schema == nullptr) members.fail("schema", "is required: a JSON schema, an object");
  members.unknown();
  format.adopt(members);
  if (format.ok()) out.add(where + ".schema", Kind::kJsonSchema, dump_json(*schema));
}

void read_response_format(Fields& fields, const RequestCaps& caps, Forms& out) {
  const Json* given = fields.object("response_format");
  if (given == nullptr) return;
  Fields format(*given, "response_format.");
  const auto type = format.choice("type", {"text", "json_object", "json_schema", "structural_tag"});
  if (!type) format.fail("type", "is required: \"text\", \"json_object\", \"json_schema\" or \"structural_tag\"");
  if (type == "json_object") out.add("response_format", Kind::kJsonObject, "");
  if (type == "json_schema") read_json_schema(format, caps, out);
  if (type == "structural_tag") out.add("response_format", Kind::kStructuralTag, dump_json(*given));
  if (type != "structural_tag") {
    format.any("json_schema");
    format.unknown();
  }
  fields.adopt(format);
}

void read_structured_outputs(Fields& fields, const RequestCaps& caps, Forms& out) {
  const Json* given = fields.object("structured_outputs");
  if (given == nullptr) return;
  const std::string where = "structured_outputs.";
  Fields members(*given, where);
  Forms own(members);
  if (auto text = json_text(members, "json", caps.max_grammar_bytes)) own.add("json", Kind::kJsonSchema, *text);
  if (auto text = members.text("regex", caps.max_grammar_bytes)) own.add("regex", Kind::kRegex, *text);
  if (auto spec = choices(members, "choice", caps)) own.add("choice", std::move(*spec));
  if (auto text = members.text("grammar", caps.max_grammar_bytes)) own.add("grammar", Kind::kEbnf, *text);
  if (members.flag("json_object", false)) own.add("json_object", Kind::kJsonObject, "");
  if (auto text = json_text(members, "structural_tag", caps.max_grammar_bytes))
    own.add("structural_tag", Kind::kStructuralTag, *text);
  members.flag("disable_any_whitespace", true);  // there never is more than a space
  members.flag("disable_fallback", true);        // there is none
  members.refuse("disable_additional_properties", "put additionalProperties into the schema", Json(false));
  members.refuse("whitespace_pattern", "JSON comes out on one line, as the model likes its spaces");
  members.unknown();
  fields.adopt(members);
  const std::optional<OutputFormat> form = std::move(own).take();
  if (!fields.ok()) return;
  if (!form)
    return fields.fail(
        "structured_outputs",
        "must have one of json, regex, choice, grammar, json_object, structural_tag; leave it out for none");
  out.add(where + form->field, form->spec);
}

void read_older_names(Fields& fields, const RequestCaps& caps, Forms& out) {
  if (auto text = json_text(fields, "guided_json", caps.max_grammar_bytes))
    out.add("guided_json", Kind::kJsonSchema, *text);
  if (auto text = fields.text("guided_regex", caps.max_grammar_bytes)) out.add("guided_regex", Kind::kRegex, *text);
  if (auto spec = choices(fields, "guided_choice", caps)) out.add("guided_choice", std::move(*spec));
  if (auto text = fields.text("guided_grammar", caps.max_grammar_bytes)) out.add("guided_grammar", Kind::kEbnf, *text);
  fields.text("guided_decoding_backend", caps.max_string_bytes);  // there is one
  fields.refuse("guided_whitespace_pattern", "JSON comes out on one line, as the model likes its spaces");
}

}  // namespace

// The compiler's message begins with the place inside the form: "/properties/a: ..." or "tools[2]/parameters/...".
Error fault_of(const OutputFormat& format, const Error& error) {
  constexpr std::string_view kTool = "tools[";
  std::string_view message = error.message;
  std::string field = format.field;
  size_t index = 0;
  if (message.starts_with(kTool)) {
    const auto [end, ec] = std::from_chars(message.data() + kTool.size(), message.data() + message.size(), index);
    if (ec == std::errc() && index < format.tools.size() && *end == ']') {
      field = format.tools[index].field + ".function";
      message.remove_prefix(static_cast<size_t>(end + 1 - message.data()));
    }
  }
  return Error(error.code, fmt::format("{}{}{}", field, message.starts_with('/') ? "" : ": ", message), field);
}

bool OutputFormat::may_lapse() const {
  return !wanted && std::none_of(tools.begin(), tools.end(), [](const Tool& tool) { return tool.strict; });
}

std::vector<std::string> relax(OutputFormat& format, std::chrono::seconds most) {
  std::vector<std::string> reasons;
  if (format.wanted) return reasons;
  const auto began = std::chrono::steady_clock::now();
  for (size_t i = 0; i < format.tools.size(); ++i) {
    std::string& schema = format.spec.tools[i].parameters;
    if (format.tools[i].strict || schema.empty()) continue;
    if (std::chrono::steady_clock::now() - began > most) return {};
    const Status followed = check_json_schema(schema);
    if (followed.ok()) continue;
    reasons.push_back(fmt::format("arguments of {} are not held to its schema: {}", format.spec.tools[i].name,
                                  followed.error().message));
    schema.clear();
  }
  return reasons;
}

std::optional<OutputFormat> parse_output_format(Fields& fields, const RequestContext& context) {
  Forms forms(fields);
  read_response_format(fields, context.caps, forms);
  read_structured_outputs(fields, context.caps, forms);
  read_older_names(fields, context.caps, forms);
  std::optional<OutputFormat> form = std::move(forms).take();
  if (!form) return std::nullopt;
  const std::string top = form->field.substr(0, form->field.find('.'));
  if (!context.has_tokenizer) fields.fail(top, "needs a tokenizer, which this model lacks");
  if (fields.flag("ignore_eos", false))
    fields.fail("ignore_eos", fmt::format("contradicts {}, whose end is the reply's", top));
  return form;
}

}  // namespace perigee

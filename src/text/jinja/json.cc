// json.dumps() over template values.

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "text/jinja/machine.h"
#include "text/jinja/strings.h"

namespace perigee {
namespace {

class JsonTextWriter {
 public:
  JsonTextWriter(TemplateMachine& machine, const TemplateJsonStyle& style) : machine_(machine), style_(style) {}
  void write(const TemplateValue& value);
  std::string take() { return std::move(out_); }

 private:
  void write_string(std::string_view text);
  void write_number(const TemplateValue& value);
  void write_array(const TemplateValues& items);
  void write_object(const TemplateDict& dict);
  void write_key(const TemplateValue& key);
  void new_line();
  bool within_cap();

  TemplateMachine& machine_;
  const TemplateJsonStyle& style_;
  std::string out_;
  int depth_ = 0;
};

bool JsonTextWriter::within_cap() {
  if (out_.size() > machine_.limits().max_value_bytes)
    machine_.over("max_value_bytes", machine_.limits().max_value_bytes);
  return machine_.charge();
}

void JsonTextWriter::new_line() {
  if (!style_.indented) return;
  machine_.charge_bytes(style_.indent.size() * static_cast<size_t>(depth_));
  out_ += '\n';
  for (int i = 0; i < depth_; ++i) out_ += style_.indent;
}

void JsonTextWriter::write_string(std::string_view text) {
  if (!machine_.charge_text(text.size())) return;
  if (!style_.ensure_ascii) return append_json_string(out_, text);
  std::string plain;
  append_json_string(plain, text);
  for (size_t at = 0; at < plain.size();) {
    const Utf8Char c = utf8_at(plain, at);
    at += c.length;
    if (c.code_point < 0x7F) {
      out_ += static_cast<char>(c.code_point);
      continue;
    }
    const auto unit = [&](uint32_t code) {
      out_ += "\\u";
      for (int shift = 12; shift >= 0; shift -= 4) out_ += "0123456789abcdef"[(code >> shift) & 15];
    };
    if (c.code_point >= 0x10000) unit(0xD800 + ((c.code_point - 0x10000) >> 10));
    unit(c.code_point >= 0x10000 ? 0xDC00 + ((c.code_point - 0x10000) & 0x3FF) : c.code_point);
  }
}

void JsonTextWriter::write_number(const TemplateValue& value) {
  if (value.is<TemplateValue::Number>())
    out_ += value.as<TemplateValue::Number>()->text;
  else
    out_ += value.is_integral() ? std::to_string(value.integer()) : format_double(value.number());
}

void JsonTextWriter::write_array(const TemplateValues& items) {
  if (items.empty()) {
    out_ += "[]";
    return;
  }
  out_ += '[';
  ++depth_;
  bool first = true;
  for (const TemplateValue& item : items) {
    if (!std::exchange(first, false)) out_ += style_.item_separator;
    new_line();
    write(item);
    if (machine_.failed()) return;
  }
  --depth_;
  new_line();
  out_ += ']';
}

void JsonTextWriter::write_key(const TemplateValue& key) {
  if (key.is_string()) return write_string(key.string());
  if (key.is_none() || key.is_number()) {
    out_ += '"';
    write(key);
    out_ += '"';
    return;
  }
  machine_.fail(fmt::format("JSON keys must be text, not {}", key.type_name()));
}

void JsonTextWriter::write_object(const TemplateDict& dict) {
  if (dict.entries.empty()) {
    out_ += "{}";
    return;
  }
  std::vector<const std::pair<TemplateValue, TemplateValue>*> entries;
  for (const auto& entry : dict.entries) entries.push_back(&entry);
  const auto by_key = [this](const auto* a, const auto* b) {
    return compare_values(machine_, a->first, b->first) == -1;
  };
  if (style_.sort_keys) std::stable_sort(entries.begin(), entries.end(), by_key);
  out_ += '{';
  ++depth_;
  bool first = true;
  for (const auto* entry : entries) {
    if (!std::exchange(first, false)) out_ += style_.item_separator;
    new_line();
    write_key(entry->first);
    out_ += style_.key_separator;
    write(entry->second);
    if (machine_.failed()) return;
  }
  --depth_;
  new_line();
  out_ += '}';
}

void JsonTextWriter::write(const TemplateValue& value) {
  using Kind = TemplateSequence::Kind;
  if (!within_cap()) return;
  if (value.is_string()) {
    write_string(value.string());
  } else if (value.is_none()) {
    out_ += "null";
  } else if (value.is_bool()) {
    out_ += value.as<bool>() ? "true" : "false";
  } else if (value.is_number()) {
    write_number(value);
  } else if (value.is_dict()) {
    write_object(value.dict());
  } else if (value.is_sequence() && (value.sequence().kind == Kind::kList || value.sequence().kind == Kind::kTuple)) {
    write_array(value.items());
  } else {
    machine_.fail(fmt::format("a {} is not JSON serializable", value.type_name()));
  }
}

}  // namespace

TemplateValue to_json_text(TemplateMachine& machine, const TemplateValue& value, const TemplateJsonStyle& style) {
  JsonTextWriter writer(machine, style);
  writer.write(value);
  return machine.make_string(writer.take());
}

}  // namespace perigee

// The form that a request asks its reply to have: response_format, structured_outputs and the older guided_* names.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "grammar/grammar_compiler.h"
#include "grammar/grammar_spec.h"
#include "server/request_fields.h"

namespace perigee {

struct OutputFormat {
  GrammarSpec spec;
  std::string field;  // that asks for it
  struct Tool {
    std::string field;  // "tools[2]" or "messages[0].tools[1]"
    bool strict;
  };
  std::vector<Tool> tools;  // of spec.tools
  bool wanted = true;       // false: calls that nobody forces; where the form cannot be had, they go without

  // Whether the reply may go without it altogether.
  bool may_lapse() const;
};

// Drops the schemas of unwanted calls that cannot be followed: any object will do for those. Strict ones stay. Returns
// why, one line for each tool, or nothing if `most` passed before all were looked at: each may take seconds, on a
// thread that compiles for other requests.
std::vector<std::string> relax(OutputFormat& format, std::chrono::seconds most = GrammarCompilerOptions().tools_time);

// A fault of `format` that its compiler found, told by the request's field.
Error fault_of(const OutputFormat& format, const Error& error);

// Nothing where no form is asked for. Faults land in `fields`: a wrong shape, and more than one form.
std::optional<OutputFormat> parse_output_format(Fields& fields, const RequestContext& context);

// The same; most requests have none of the members that ask for one.
inline std::optional<OutputFormat> read_output_format(Fields& fields, const RequestContext& context) {
  bool asks = false;
  for (const char* name : {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                           "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern"})
    asks = fields.any(name) != nullptr || asks;
  return asks ? parse_output_format(fields, context) : std::nullopt;
}

}  // namespace perigee

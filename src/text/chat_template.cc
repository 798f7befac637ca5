#include "text/chat_template.h"

#include <fmt/core.h>

#include <algorithm>

#include "text/jinja/parser.h"
#include "text/jinja/renderer.h"

namespace perigee {

Result<ChatTemplate> ChatTemplate::parse(std::string source) {
  if (source.size() > kMaxTemplateBytes)
    return Error(Code::kTooLarge,
                 fmt::format("chat template of {} bytes is over the limit of {}", source.size(), kMaxTemplateBytes));
  ASSIGN_OR_RETURN(TemplateProgram program, parse_template(source));
  return ChatTemplate(std::make_shared<const TemplateProgram>(std::move(program)));
}

Result<std::string> ChatTemplate::render(const Json& context, const TemplateLimits& limits) const {
  return TemplateRenderer(*program_, limits).run(context);
}

bool ChatTemplate::mentions(std::string_view variable) const {
  const auto at = std::find(program_->names.begin(), program_->names.end(), variable);
  return at != program_->names.end() && program_->is_read[static_cast<size_t>(at - program_->names.begin())];
}

}  // namespace perigee

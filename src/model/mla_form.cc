#include "model/mla_form.h"

namespace perigee {

MlaForm choose_mla_form(const MlaShape& shape, TokenKind kind, int64_t new_tokens, int64_t context) {
  if (kind == TokenKind::kPrompt && context <= kOneFormTokens) return MlaForm::kExpanded;
  if (kind == TokenKind::kOutput && context + new_tokens <= kOneFormTokens) return MlaForm::kAbsorbed;
  const double n = static_cast<double>(new_tokens);
  const double cached = static_cast<double>(context);
  const double pairs = n * cached + n * (n + 1) / 2;
  const double saved = 2.0 * static_cast<double>(2 * shape.latent + shape.rope) -
                       2.0 * static_cast<double>(shape.nope + shape.rope + shape.value);
  const double expansion = 2.0 * static_cast<double>(shape.latent * (shape.nope + shape.value));
  return pairs * saved > cached * expansion ? MlaForm::kExpanded : MlaForm::kAbsorbed;
}

}  // namespace perigee

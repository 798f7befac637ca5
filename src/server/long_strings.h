// Refuses a body whose text cannot fit the model's context, before anything is built of it.
#pragma once

#include <cstddef>
#include <string_view>

#include "base/result.h"
#include "text/tokenizer.h"

namespace perigee {

// Looks at the strings of JSON text. One of more than 1 MiB, as it is written there, that certainly has more than
// `max_tokens` tokens is kBadInput. Costs a pass over the text at about 1 GB/s, and makes nothing of what is not JSON.
Status check_long_strings(std::string_view body, const TokenBound& bound, size_t max_tokens);

}  // namespace perigee

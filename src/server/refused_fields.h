// The fields that this server refuses: what exists elsewhere but not here, and would give a wrong answer if ignored.
#pragma once

#include "server/fields.h"

namespace perigee {

enum class Api { kCompletions, kChat };

// 400 for the first of them that asks for something; the values that ask for nothing pass (best_of equal to `n`,
// modalities ["text"]). Also reads the fields that are accepted and have no effect, each with its type.
void refuse_unsupported(Fields& fields, Api api, int64_t n);

}  // namespace perigee

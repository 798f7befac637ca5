// The one vocabulary of errors: every error body, whole or as an event of a stream, comes from here.
//
// {"error": {"message", "type", "param", "code"}}: `code` repeats the HTTP status, `type` is the word for it (the table
// in docs/operation.md), `param` names the request's field at fault or is null. Text of a client that a message quotes
// is cut and made valid UTF-8 here, wherever it came from.
#pragma once

#include <cstddef>
#include <string>

#include "base/json.h"
#include "server/http_types.h"

namespace perigee {

constexpr size_t kMaxErrorMessageBytes = 1024, kMaxErrorParamBytes = 128;

const char* error_type(int status);
int status_of(Code code);

Json error_json(int status, const std::string& message, const std::string& param = "");
HttpReply error_reply(int status, const std::string& message, const std::string& param = "");
HttpReply error_reply(const Error& error);  // the status that its code stands for

}  // namespace perigee

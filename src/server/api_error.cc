#include "server/api_error.h"

#include "base/utf8.h"

namespace perigee {

const char* error_type(int status) {
  switch (status) {
    case 401: return "AuthenticationError";
    case 404: return "NotFoundError";
    case 405: return "MethodNotAllowedError";
    case 413:
    case 431: return "RequestTooLargeError";
    case 429: return "RateLimitError";
    case 501:
    case 505: return "NotImplementedError";
    case 503: return "ServiceUnavailableError";
    case 408:
    case 504: return "TimeoutError";
    default: return status < 500 ? "BadRequestError" : "InternalServerError";
  }
}

int status_of(Code code) {
  switch (code) {
    case Code::kBadInput: return 400;
    case Code::kNotFound: return 404;
    case Code::kTooLarge: return 413;
    case Code::kExhausted: return 429;
    case Code::kUnavailable:
    case Code::kCancelled: return 503;
    case Code::kDeadline: return 504;
    case Code::kDeviceLost: return 500;
  }
  return 500;
}

Json error_json(int status, const std::string& message, const std::string& param) {
  Json error(Json::Object{{"message", excerpt(message, kMaxErrorMessageBytes)},
                          {"type", error_type(status)},
                          {"param", param.empty() ? Json() : Json(excerpt(param, kMaxErrorParamBytes))},
                          {"code", status}});
  return Json(Json::Object{{"error", std::move(error)}});
}

HttpReply error_reply(int status, const std::string& message, const std::string& param) {
  HttpReply reply;
  reply.status = status;
  reply.body = dump_json(error_json(status, message, param));
  if (status == 429 || status == 503) reply.headers.emplace_back("Retry-After", status == 429 ? "1" : "5");
  if (status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

HttpReply error_reply(const Error& error) {
  return error_reply(status_of(error.code), error.message, error.field);
}

}  // namespace perigee

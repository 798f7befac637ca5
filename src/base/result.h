// Result<T>: the value of an operation that is expected to fail sometimes.
//
// An expected failure (bad input, a full queue, a missing file) is a value, never an exception; a bug is a CHECK
// (base/check.h). The code says which of the few kinds of failure it is, the message names the field, the limit and
// the way out. Shaped like std::expected, which C++20 lacks.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/check.h"

namespace perigee {

enum class Code {
  kBadInput,     // the caller's bytes are wrong: HTTP 400
  kNotFound,     // a file, model or tensor that is not there
  kTooLarge,     // over a documented cap: HTTP 413
  kExhausted,    // a queue or a pool is full: HTTP 429 or 503
  kUnavailable,  // not built in, not ready, draining: HTTP 503
  kCancelled,
  kDeadline,
  kDeviceLost,
};

const char* code_name(Code code);

struct Error {
  Error(Code code_in, std::string message_in, std::string field_in = "")
      : code(code_in), message(std::move(message_in)), field(std::move(field_in)) {}
  Code code;
  std::string message;
  std::string field;  // request or config field at fault; empty when there is none
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  // Requires ok(): asking a failed result for its value is a bug.
  T& value() & {
    check_ok();
    return std::get<0>(state_);
  }
  const T& value() const& {
    check_ok();
    return std::get<0>(state_);
  }
  T&& value() && {
    check_ok();
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const {
    CHECK(!ok(), "error() of a successful result");
    return std::get<1>(state_);
  }

 private:
  void check_ok() const { CHECK(ok(), "value() of a failed result: ", std::get<1>(state_).message); }

  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}
  bool ok() const { return !error_; }
  explicit operator bool() const { return ok(); }
  const Error& error() const {
    CHECK(error_, "error() of a successful result");
    return *error_;
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

inline Error bad_input(std::string message, std::string field = "") {
  return Error(Code::kBadInput, std::move(message), std::move(field));
}

}  // namespace perigee

#define PERIGEE_JOIN2(a, b) a##b
#define PERIGEE_JOIN(a, b) PERIGEE_JOIN2(a, b)

// ASSIGN_OR_RETURN(auto x, f()): x = *f(), or return f()'s error from the enclosing function.
#define ASSIGN_OR_RETURN(decl, expr) ASSIGN_OR_RETURN_IMPL(PERIGEE_JOIN(result_, __LINE__), decl, expr)
#define ASSIGN_OR_RETURN_IMPL(tmp, decl, expr) \
  auto tmp = (expr);                           \
  if (!tmp.ok()) return tmp.error();           \
  decl = std::move(tmp).value()

#define RETURN_IF_ERROR(expr)                                         \
  do {                                                                \
    if (auto status_ = (expr); !status_.ok()) return status_.error(); \
  } while (false)

// SPDX-License-Identifier: Apache-2.0
//
// Errors as values. Codes have gRPC's numbers, so that the server converts them without a table,
// but nothing here depends on gRPC.

#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace attend {

enum class Code {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

// "INVALID_ARGUMENT" etc.
std::string_view CodeName(Code code);

// OK, or a code with a message that names the field, the value and the bound. `reason` is an
// optional number by which a program classifies its refusals for metrics; 0 = none.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {
    assert(code != Code::kOk);
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  uint8_t reason() const { return reason_; }
  void set_reason(uint8_t reason) { reason_ = reason; }
  std::string ToString() const;

 private:
  Code code_ = Code::kOk;
  uint8_t reason_ = 0;
  std::string message_;
};

inline Status InvalidArgument(std::string message) {
  return Status(Code::kInvalidArgument, std::move(message));
}
inline Status Unimplemented(std::string message) {
  return Status(Code::kUnimplemented, std::move(message));
}
inline Status ResourceExhausted(std::string message) {
  return Status(Code::kResourceExhausted, std::move(message));
}
inline Status Unavailable(std::string message) {
  return Status(Code::kUnavailable, std::move(message));
}
inline Status Internal(std::string message) { return Status(Code::kInternal, std::move(message)); }

// A value, or the status that explains its absence.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                  // NOLINT: implicit
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }  // NOLINT: implicit

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace attend

#define ATTEND_RETURN_IF_ERROR(expression)           \
  do {                                               \
    ::attend::Status attend_status_ = (expression);  \
    if (!attend_status_.ok()) return attend_status_; \
  } while (false)

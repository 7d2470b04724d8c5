// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/status.h"

namespace attend {

std::string_view CodeName(Code code) {
  static constexpr std::pair<Code, std::string_view> kNames[] = {
      {Code::kOk, "OK"},
      {Code::kCancelled, "CANCELLED"},
      {Code::kUnknown, "UNKNOWN"},
      {Code::kInvalidArgument, "INVALID_ARGUMENT"},
      {Code::kDeadlineExceeded, "DEADLINE_EXCEEDED"},
      {Code::kNotFound, "NOT_FOUND"},
      {Code::kAlreadyExists, "ALREADY_EXISTS"},
      {Code::kPermissionDenied, "PERMISSION_DENIED"},
      {Code::kResourceExhausted, "RESOURCE_EXHAUSTED"},
      {Code::kFailedPrecondition, "FAILED_PRECONDITION"},
      {Code::kOutOfRange, "OUT_OF_RANGE"},
      {Code::kUnimplemented, "UNIMPLEMENTED"},
      {Code::kInternal, "INTERNAL"},
      {Code::kUnavailable, "UNAVAILABLE"},
      {static_cast<Code>(16), "UNAUTHENTICATED"}};
  for (const auto& [each, name] : kNames) {
    if (each == code) return name;
  }
  return "UNKNOWN";
}

std::string Status::ToString() const {
  if (ok()) return "OK";
  return std::string(CodeName(code_)) + ": " + message_;
}

}  // namespace attend

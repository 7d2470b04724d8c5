// SPDX-License-Identifier: Apache-2.0

#include "server/wire/grpc_status.h"

namespace attend {

std::string CutMessage(std::string_view message) {
  constexpr std::string_view kMark = "...";
  if (message.size() <= kStatusMessageBytesMax) return std::string(message);
  size_t end = kStatusMessageBytesMax - kMark.size();
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;  // UTF-8
  return std::string(message.substr(0, end)) + std::string(kMark);
}

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status();
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), CutMessage(status.message()));
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return Status();
  switch (status.error_code()) {
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DATA_LOSS:
    case grpc::StatusCode::DO_NOT_USE:
      // Codes that this project does not use; the message keeps the meaning.
      return Status(Code::kUnknown, "gRPC status " + std::to_string(status.error_code()) + ": " +
                                        status.error_message());
    default:
      return Status(static_cast<Code>(status.error_code()), status.error_message());
  }
}

bool IsRetryable(Code code) {
  return code == Code::kResourceExhausted || code == Code::kUnavailable;
}

}  // namespace attend

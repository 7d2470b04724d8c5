// SPDX-License-Identifier: Apache-2.0

#include "server/transport/request_head.h"

#include <utility>

namespace attend {
namespace {

constexpr int64_t kHeaderOverheadBytes = 32;  // RFC 9113, 6.5.2

}  // namespace

void RequestHead::Add(std::string_view name, std::string_view value, int64_t list_bytes_max) {
  list_bytes += static_cast<int64_t>(name.size() + value.size()) + kHeaderOverheadBytes;
  if (list_bytes > list_bytes_max) too_large = true;
  if (too_large) return;
  if (name == ":method") {
    method = value;
  } else if (name == ":path") {
    path = value;
  } else if (name == "content-type") {
    grpc = value.starts_with("application/grpc");
  } else if (name == "grpc-encoding") {
    encoding = value;
  } else if (name == "grpc-timeout") {
    timeout = std::string(value);
  } else if (!name.starts_with(':') && name != "te" && name != "grpc-accept-encoding") {
    malformed |= !AddReceived(name, value, metadata);
  }
}

void RequestHead::Clear() {
  constexpr size_t kPathBytesKept = 256;
  RequestHead cleared;
  metadata.Clear();
  cleared.metadata = std::move(metadata);
  if (path.capacity() <= kPathBytesKept) {
    path.clear();
    cleared.path = std::move(path);
  }
  *this = std::move(cleared);
}

}  // namespace attend

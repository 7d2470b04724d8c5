// SPDX-License-Identifier: Apache-2.0
//
// The headers of a request, complete.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/transport/metadata.h"

namespace attend {

struct RequestHead {
  std::string method, path, encoding;
  bool grpc = false;  // its content-type is that of gRPC
  std::optional<std::string> timeout;
  CallMetadata metadata;   // other headers, except those gRPC itself uses
  int64_t list_bytes = 0;  // as HTTP/2 counts: 32 extra for each header
  bool too_large = false;  // over the limit; nothing more is kept
  bool malformed = false;  // a binary value is not base64

  // Counts a header, and keeps it if the list so far has at most `list_bytes_max`.
  void Add(std::string_view name, std::string_view value, int64_t list_bytes_max);
  // Resets it, but keeps the memory an ordinary request needs.
  void Clear();
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The headers of a request, once they are whole.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/transport/metadata.h"

namespace attend {

struct RequestHead {
  std::string method, path, encoding;
  bool grpc = false;  // so says its content-type
  std::optional<std::string> timeout;
  CallMetadata metadata;   // the rest, but for headers that gRPC itself uses
  int64_t list_bytes = 0;  // as HTTP/2 counts them: 32 more for each header
  bool too_large = false;  // beyond the limit, from where on nothing is kept
  bool malformed = false;  // a binary value is no base64

  // Counts the next header, and keeps it if all so far have at most `list_bytes_max`.
  void Add(std::string_view name, std::string_view value, int64_t list_bytes_max);
  // As if it were new; it keeps the memory that a usual one takes.
  void Clear();
};

}  // namespace attend

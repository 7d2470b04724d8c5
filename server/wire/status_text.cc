// SPDX-License-Identifier: Apache-2.0

#include "server/wire/status_text.h"

namespace attend {

std::string CutMessage(std::string_view message) {
  constexpr std::string_view kMark = "...";
  if (message.size() <= kStatusMessageBytesMax) return std::string(message);
  size_t end = kStatusMessageBytesMax - kMark.size();
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xc0) == 0x80) --end;  // UTF-8
  return std::string(message.substr(0, end)) + std::string(kMark);
}

bool IsRetryable(Code code) {
  return code == Code::kResourceExhausted || code == Code::kUnavailable;
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/util/random_token.h"

#include <sys/random.h>

namespace attend {

Result<std::string> RandomToken() {
  std::string token(kTokenBytes, '\0');
  // Up to 256 bytes are never truncated once the kernel's pool is ready.
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return Internal("the kernel provided no random bytes for a token");
  }
  return token;
}

std::string HexText(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

}  // namespace attend

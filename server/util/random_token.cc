// SPDX-License-Identifier: Apache-2.0

#include "server/util/random_token.h"

#include <sys/random.h>

namespace attend {

Result<std::string> RandomToken() {
  std::string token(kTokenBytes, '\0');
  // Requests of up to 256 bytes are never cut short once the kernel's pool is ready.
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
    return Internal("the kernel gave no randomness for a token");
  }
  return token;
}

}  // namespace attend

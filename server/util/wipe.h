// SPDX-License-Identifier: Apache-2.0
//
// Overwrites a secret after use, so that it does not remain in freed memory.

#pragma once

#include <string.h>

#include <string>

namespace attend {

inline void Wipe(std::string& secret) {
  explicit_bzero(secret.data(), secret.size());
  secret.clear();
}

// Wipes a string at the end of a scope.
class WipedAtEnd {
 public:
  explicit WipedAtEnd(std::string& secret) : secret_(secret) {}
  ~WipedAtEnd() { Wipe(secret_); }
  WipedAtEnd(const WipedAtEnd&) = delete;
  WipedAtEnd& operator=(const WipedAtEnd&) = delete;

 private:
  std::string& secret_;
};

}  // namespace attend

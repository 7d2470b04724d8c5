// SPDX-License-Identifier: Apache-2.0
//
// Thread names, for top -H, perf and debuggers.

#pragma once

#include <sys/prctl.h>

#include <cstddef>

namespace attend {

// A string literal of at most 15 bytes, Linux's limit.
class ThreadName {
 public:
  template <size_t N>
  constexpr ThreadName(const char (&name)[N]) : name_(name) {  // NOLINT: implicit
    static_assert(N <= 16, "Linux cuts longer names");
  }
  const char* get() const { return name_; }

 private:
  const char* name_;
};

// Names the calling thread.
inline void NameThread(ThreadName name) { (void)prctl(PR_SET_NAME, name.get()); }

}  // namespace attend

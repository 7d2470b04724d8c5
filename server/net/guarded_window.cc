// SPDX-License-Identifier: Apache-2.0
//
// A function of a process that links attend_read_guard, in gRPC's place: whether a DATA frame
// exceeds its stream's window. Where the server grants less than a stream has sent already, that
// window is negative (RFC 9113, 6.9.2), and gRPC 1.51 resets the stream for the frame without bytes
// that ends it, which needs no window (6.9). Debian's gRPC calls its own functions through the
// dynamic linker, so the executable's come first.

#include <absl/status/status.h>
#include <dlfcn.h>

#include <cstdint>

#include "server/net/guarded_functions.h"

__attribute__((visibility("default"))) absl::Status ReceiveData(void* update, int64_t bytes) asm(
    ATTEND_RECV_DATA);

absl::Status ReceiveData(void* update, int64_t bytes) {
  static auto* const receive =
      reinterpret_cast<decltype(ReceiveData)*>(dlsym(RTLD_NEXT, ATTEND_RECV_DATA));
  return bytes == 0 ? absl::OkStatus() : receive(update, bytes);
}

// SPDX-License-Identifier: Apache-2.0
//
// Leaves RST_STREAM of streams that have not begun out of what a client sends. To RFC 9113 (5.1)
// and nghttp2 such a frame is an error of the connection, and with it of all other calls on it. But
// gRPC's clients and Envoy send it for a call that is cancelled before its headers have left, and
// gRPC's servers ignore it.
//
// Only heads of frames are looked at: length, type and stream. Not thread-safe.

#pragma once

#include <nghttp2/nghttp2.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace attend {

class IdleResets {
 public:
  // Takes from the front of `bytes`, the next that came. Returns what nghttp2 is to read of it, or
  // a head that came in pieces; empty: `bytes` is used up. Valid until the next call.
  std::string_view Next(std::string_view& bytes);
  // How many frames were left out since the last call.
  int64_t TakeCount();

 private:
  static constexpr size_t kHeadBytes = 9;

  // Begins a frame. Whether it is left out.
  bool Begin(const char* head);

  // Bytes left of the frame that is coming; at first, of the connection's preface.
  size_t left_ = NGHTTP2_CLIENT_MAGIC_LEN;
  bool left_out_ = false;
  std::array<char, kHeadBytes> head_;  // that comes in pieces
  size_t head_bytes_ = 0;
  uint32_t newest_ = 0;  // stream that has begun
  int64_t count_ = 0;
};

}  // namespace attend

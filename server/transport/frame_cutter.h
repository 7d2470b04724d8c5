// SPDX-License-Identifier: Apache-2.0
//
// Cuts what a client sends into frames, so that each can be judged by its head before nghttp2 reads
// it: nghttp2 skips frames of unknown types and of closed streams without a callback. The head of a
// frame is handed on whole, however it comes. Not thread-safe.

#pragma once

#include <nghttp2/nghttp2.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace attend {

class FrameCutter {
 public:
  // Takes a piece of one frame from the front of `bytes`, the next that came. Empty: `bytes` is
  // used up. Valid until the next call.
  std::string_view Next(std::string_view& bytes);
  // The frame that the last piece belongs to. Before the first frame, its type is kPreface.
  const nghttp2_frame_hd& head() const { return head_; }
  // The last piece begins with the frame's head.
  bool begins() const { return begins_; }
  // Bytes of the frame's payload that are still to come.
  size_t left() const { return left_; }

  static constexpr uint8_t kPreface = 0xff;

 private:
  static constexpr size_t kHeadBytes = 9;

  void Begin(const char* head);

  nghttp2_frame_hd head_ = {
      .length = 0, .stream_id = 0, .type = kPreface, .flags = 0, .reserved = 0};
  size_t left_ = NGHTTP2_CLIENT_MAGIC_LEN;
  bool begins_ = false;
  std::array<char, kHeadBytes> bytes_;  // a head that comes in pieces
  size_t bytes_count_ = 0;
};

}  // namespace attend

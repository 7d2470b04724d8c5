// SPDX-License-Identifier: Apache-2.0
//
// HTTP/2 bytes written by hand, valid and invalid: a library would refuse to send what a client
// must not send.

#pragma once

#include <nghttp2/nghttp2.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace attend::http2 {

inline constexpr std::string_view kPreface = NGHTTP2_CLIENT_MAGIC;

// A number in `bytes` bytes, big-endian.
inline std::string Number(uint64_t value, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text += static_cast<char>(value >> (8 * i));
  return text;
}

// A frame header that announces `length` bytes.
inline std::string Head(size_t length, uint8_t type, uint8_t flags, uint32_t id) {
  return Number(length, 3) + static_cast<char>(type) + static_cast<char>(flags) + Number(id, 4);
}
inline std::string Frame(uint8_t type, uint8_t flags, uint32_t id, std::string_view payload) {
  return Head(payload.size(), type, flags, id).append(payload);
}

inline std::string Settings(std::string_view payload = "") {
  return Frame(NGHTTP2_SETTINGS, 0, 0, payload);
}
inline std::string Setting(uint16_t key, uint32_t value) {
  return Settings(Number(key, 2) + Number(value, 4));
}
inline std::string SettingsAck() { return Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0, ""); }
inline std::string WindowUpdate(uint32_t id, uint32_t bytes) {
  return Frame(NGHTTP2_WINDOW_UPDATE, 0, id, Number(bytes, 4));
}
inline std::string Data(uint32_t id, std::string_view bytes, uint8_t flags = 0) {
  return Frame(NGHTTP2_DATA, flags, id, bytes);
}
inline std::string Reset(uint32_t id, uint32_t error = NGHTTP2_CANCEL) {
  return Frame(NGHTTP2_RST_STREAM, 0, id, Number(error, 4));
}

// RFC 7541, 5.1: an integer in a prefix of `bits` bits, with `first` as the bits above it.
inline std::string Integer(uint64_t value, int bits, uint8_t first = 0) {
  const uint64_t most = (uint64_t{1} << bits) - 1;
  if (value < most) return {static_cast<char>(first | value)};
  std::string text = {static_cast<char>(first | most)};
  for (value -= most; value >= 128; value >>= 7) text += static_cast<char>(value | 128);
  return text += static_cast<char>(value);
}
inline std::string Text(std::string_view text) { return Integer(text.size(), 7).append(text); }
// A literal header that is not indexed.
inline std::string Field(std::string_view name, std::string_view value) {
  return std::string(1, '\0') + Text(name) + Text(value);
}
// A header by its index in the tables.
inline std::string Indexed(uint64_t index) { return Integer(index, 7, 0x80); }
inline std::string TableSize(uint64_t bytes) { return Integer(bytes, 5, 0x20); }

// The headers that every request has.
inline std::string Fields() {
  return Indexed(3) + Indexed(6) + Field(":path", "/a.B/C") + Field(":authority", "test") +
         Field("content-type", "application/grpc") + Field("te", "trailers");
}

inline constexpr uint8_t kEndStream = NGHTTP2_FLAG_END_STREAM;
inline constexpr uint8_t kEndHeaders = NGHTTP2_FLAG_END_HEADERS;
inline constexpr uint8_t kPadded = NGHTTP2_FLAG_PADDED;
inline constexpr uint8_t kPriority = NGHTTP2_FLAG_PRIORITY;

inline std::string Headers(uint32_t id, std::string_view block,
                           uint8_t flags = kEndHeaders | kEndStream) {
  return Frame(NGHTTP2_HEADERS, flags, id, block);
}
inline std::string Continuation(uint32_t id, std::string_view block, uint8_t flags = kEndHeaders) {
  return Frame(NGHTTP2_CONTINUATION, flags, id, block);
}
// A request that stays open, and one that ends.
inline std::string Open(uint32_t id) { return Headers(id, Fields(), kEndHeaders); }
inline std::string Whole(uint32_t id) { return Headers(id, Fields()); }

}  // namespace attend::http2

// SPDX-License-Identifier: Apache-2.0
//
// Decodes untrusted text as UTF-8, character by character. Pure.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace attend {

struct Character {
  uint32_t code = 0;
  size_t bytes = 0;  // 0: not UTF-8
};

// The first character of `text`, which must not be empty. Overlong forms and surrogates are
// rejected.
inline Character FirstOf(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  uint32_t code = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[bytes] || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

// The longest prefix of whole characters that takes at most `bytes_max` bytes of output; each
// invalid byte becomes U+FFFD.
inline std::string ToUtf8(std::string_view text, size_t bytes_max) {
  std::string out;
  while (!text.empty()) {
    const Character first = FirstOf(text);
    const std::string_view character =
        first.bytes == 0 ? std::string_view("\xef\xbf\xbd") : text.substr(0, first.bytes);
    if (out.size() + character.size() > bytes_max) break;
    out += character;
    text.remove_prefix(first.bytes == 0 ? 1 : first.bytes);
  }
  return out;
}

}  // namespace attend

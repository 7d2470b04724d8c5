// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/printable.h"

#include <array>
#include <cstdio>

#include "kernels/util/utf8.h"

namespace attend {
namespace {

__attribute__((format(printf, 1, 0))) void AppendCode(const char* form, uint32_t code,
                                                      std::string* out) {
  std::array<char, 16> text;
  std::snprintf(text.data(), text.size(), form, code);
  *out += text.data();
}

}  // namespace

bool IsHidden(uint32_t code) {
  struct Range {
    uint32_t first, last;
  };
  constexpr Range kHidden[] = {
      {0x0, 0x1f},      {0x7f, 0x9f},        // control characters
      {0xad, 0xad},     {0x61c, 0x61c},      // soft hyphen; Arabic letter mark
      {0x200b, 0x200f}, {0x2028, 0x202e},    // no width, direction; line separators, direction
      {0x2060, 0x206f}, {0xfe00, 0xfe0f},    // invisible operators, direction; variants
      {0xfeff, 0xfeff}, {0xfff0, 0xfffb},    // byte order mark; annotations
      {0xfffe, 0xffff}, {0xe0000, 0xe0fff},  // noncharacters; tags, variants
  };
  for (const Range& range : kHidden) {
    if (code >= range.first && code <= range.last) return true;
  }
  return false;
}

void AppendPrintable(std::string_view text, bool quoted, std::string* out) {
  while (!text.empty()) {
    const Character first = FirstOf(text);
    const std::string_view bytes = text.substr(0, first.bytes == 0 ? 1 : first.bytes);
    text.remove_prefix(bytes.size());
    if (first.bytes == 0) {
      AppendCode("\\x%02x", static_cast<unsigned char>(bytes[0]), out);
    } else if (first.code == '\n') {
      *out += "\\n";
    } else if (IsHidden(first.code)) {
      AppendCode(first.code < 0x10000 ? "\\u%04x" : "\\U%08x", first.code, out);
    } else {
      if (quoted && (first.code == '"' || first.code == '\\')) *out += '\\';
      *out += bytes;
    }
  }
}

std::string Printable(std::string_view text) {
  std::string out;
  AppendPrintable(text, /*quoted=*/false, &out);
  return out;
}

}  // namespace attend

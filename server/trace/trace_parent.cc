// SPDX-License-Identifier: Apache-2.0

#include "server/trace/trace_parent.h"

#include <cstdio>

namespace attend {
namespace {

// 00-TTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTT-SSSSSSSSSSSSSSSS-FF
constexpr size_t kBytes = 55;

// Parses the first `digits` lower-case hexadecimal digits of the text, which must be that long.
std::optional<uint64_t> Hex(std::string_view text, size_t digits) {
  uint64_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    const char c = text[i];
    const bool decimal = c >= '0' && c <= '9';
    if (!decimal && !(c >= 'a' && c <= 'f')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(decimal ? c - '0' : c - 'a' + 10);
  }
  return value;
}

}  // namespace

std::optional<TraceParent> ParseTraceParent(std::string_view text) {
  if (text.size() < kBytes || text[2] != '-' || text[35] != '-' || text[52] != '-') {
    return std::nullopt;
  }
  const std::optional<uint64_t> version = Hex(text, 2);
  if (!version || *version == 0xff) return std::nullopt;
  if (text.size() > kBytes && (*version == 0 || text[kBytes] != '-')) return std::nullopt;
  const std::optional<uint64_t> high = Hex(text.substr(3), 16);
  const std::optional<uint64_t> low = Hex(text.substr(19), 16);
  const std::optional<uint64_t> span = Hex(text.substr(36), 16);
  const std::optional<uint64_t> flags = Hex(text.substr(53), 2);
  if (!high || !low || !span || !flags || (*high | *low) == 0 || *span == 0) return std::nullopt;
  return TraceParent{*high, *low, *span, (*flags & 1) != 0};
}

std::string TraceIdText(const TraceParent& parent) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx",
                static_cast<unsigned long long>(parent.trace_high),
                static_cast<unsigned long long>(parent.trace_low));
  return text;
}

std::string SpanIdText(uint64_t span) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(span));
  return text;
}

std::string FormatTraceParent(const TraceParent& parent) {
  return "00-" + TraceIdText(parent) + "-" + SpanIdText(parent.span) +
         (parent.sampled ? "-01" : "-00");
}

}  // namespace attend

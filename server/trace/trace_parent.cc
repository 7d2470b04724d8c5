// SPDX-License-Identifier: Apache-2.0

#include "server/trace/trace_parent.h"

#include <fmt/format.h>

#include "server/util/parse_number.h"

namespace attend {
namespace {

// 00-TTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTT-SSSSSSSSSSSSSSSS-FF
constexpr size_t kBytes = 55;

// Parses the first `digits` lower-case hexadecimal digits of the text, which must be that long.
std::optional<uint64_t> Hex(std::string_view text, size_t digits) {
  text = text.substr(0, digits);
  if (text.find_first_not_of("0123456789abcdef") != text.npos) return std::nullopt;
  return ParseNumber<uint64_t>(text, 16);
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
  return fmt::format("{:016x}{:016x}", parent.trace_high, parent.trace_low);
}

std::string SpanIdText(uint64_t span) { return fmt::format("{:016x}", span); }

std::string FormatTraceParent(const TraceParent& parent) {
  return "00-" + TraceIdText(parent) + "-" + SpanIdText(parent.span) +
         (parent.sampled ? "-01" : "-00");
}

}  // namespace attend

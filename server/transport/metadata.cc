// SPDX-License-Identifier: Apache-2.0

#include "server/transport/metadata.h"

#include <array>
#include <chrono>
#include <cstdint>

#include "server/util/parse_number.h"

namespace attend {
namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr int kBitsPerDigit = 6;
constexpr size_t kTimeoutDigitsMax = 8;

// The value of each base64 digit; -1: not a digit.
constexpr std::array<int8_t, 256> MakeDigits() {
  std::array<int8_t, 256> digits{};
  for (int8_t& digit : digits) digit = -1;
  for (size_t i = 0; i < kAlphabet.size(); ++i) {
    digits[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
  }
  return digits;
}
constexpr std::array<int8_t, 256> kDigits = MakeDigits();

constexpr std::string_view kTimeUnits = "HMSmun";
constexpr std::array<Duration, kTimeUnits.size()> kTimes = {
    std::chrono::hours(1),        std::chrono::minutes(1),      std::chrono::seconds(1),
    std::chrono::milliseconds(1), std::chrono::microseconds(1), std::chrono::nanoseconds(1)};

}  // namespace

std::optional<std::string_view> CallMetadata::Find(std::string_view key) const {
  for (const auto& [name, value] : *this) {
    if (name == key) return value;
  }
  return std::nullopt;
}

bool IsBinaryKey(std::string_view key) { return key.ends_with("-bin"); }

std::string EncodeBase64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() * 8 + kBitsPerDigit - 1) / kBitsPerDigit);
  uint32_t bits = 0;
  int count = 0;
  for (const char byte : bytes) {
    bits = bits << 8 | static_cast<uint8_t>(byte);
    for (count += 8; count >= kBitsPerDigit; count -= kBitsPerDigit) {
      text.push_back(kAlphabet[bits >> (count - kBitsPerDigit) & 63]);
    }
  }
  if (count > 0) text.push_back(kAlphabet[bits << (kBitsPerDigit - count) & 63]);
  return text;
}

std::optional<std::string> DecodeBase64(std::string_view text) {
  const size_t padded = text.size();
  while (text.ends_with('=')) text.remove_suffix(1);
  const bool pads_well = padded == text.size() || (padded % 4 == 0 && padded - text.size() <= 2);
  if (!pads_well || text.size() % 4 == 1) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() * kBitsPerDigit / 8);
  uint32_t bits = 0;
  int count = 0;
  for (const char digit : text) {
    const int value = kDigits[static_cast<uint8_t>(digit)];
    if (value < 0) return std::nullopt;
    bits = bits << kBitsPerDigit | static_cast<uint32_t>(value);
    count += kBitsPerDigit;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count));
    }
  }
  return bytes;
}

bool AddReceived(std::string_view key, std::string_view value, CallMetadata& metadata) {
  if (!IsBinaryKey(key)) {
    metadata.Add(key, value);
    return true;
  }
  for (;;) {
    const size_t comma = value.find(',');
    std::optional<std::string> bytes = DecodeBase64(value.substr(0, comma));
    if (!bytes) return false;
    metadata.Add(key, *bytes);
    if (comma == std::string_view::npos) return true;
    value.remove_prefix(comma + 1);
    while (value.starts_with(' ')) value.remove_prefix(1);
  }
}

std::string PercentEncode(std::string_view message) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string text;
  text.reserve(message.size());
  for (const char c : message) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte >= ' ' && byte <= '~' && c != '%') {
      text.push_back(c);
    } else {
      text.append({'%', kHex[byte >> 4], kHex[byte & 15]});
    }
  }
  return text;
}

std::optional<Duration> ParseTimeout(std::string_view text) {
  if (text.size() < 2 || text.size() > kTimeoutDigitsMax + 1) return std::nullopt;
  const size_t unit = kTimeUnits.find(text.back());
  if (unit == kTimeUnits.npos) return std::nullopt;
  text.remove_suffix(1);
  const std::optional<int64_t> number = ParseNumber<int64_t>(text);
  if (!number || text.front() == '-') return std::nullopt;
  // Only hours can overflow: 99,999,999 of them exceed 2^63 ns.
  if (*number > Duration::max() / kTimes[unit]) return Duration::max();
  return kTimes[unit] * *number;
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// How gRPC writes metadata, deadlines and messages of statuses as headers of HTTP/2.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"

namespace attend {

// Keys and values in the order in which they came; a key may come again. Keys are lower case. The
// value of a key that ends in -bin is the bytes themselves, which travel as base64.
class CallMetadata {
 public:
  using Entry = std::pair<std::string, std::string>;

  void Add(std::string key, std::string value) {
    if (entries_.empty()) entries_.reserve(kUsual);
    entries_.emplace_back(std::move(key), std::move(value));
  }
  // The first value of that key; null if there is none.
  const std::string* Find(std::string_view key) const;
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  static constexpr size_t kUsual = 4;  // entries at most, in one piece of memory

  std::vector<Entry> entries_;
};

bool IsBinaryKey(std::string_view key);

// Without padding, as gRPC sends it.
std::string EncodeBase64(std::string_view bytes);
// With padding or without. Nothing if it is no base64.
std::optional<std::string> DecodeBase64(std::string_view text);

// Adds the values of a header that came, of which a binary one may have several between commas.
// False if it is binary and no base64.
bool AddReceived(std::string_view key, std::string_view value, CallMetadata& metadata);

// The message of a status as grpc-message: bytes outside of printable ASCII, and the percent sign,
// as %XX.
std::string PercentEncode(std::string_view message);

// The time that a grpc-timeout leaves, such as 100m for 0.1 s: at most eight digits and a unit.
// Nothing if it is none.
std::optional<Duration> ParseTimeout(std::string_view text);

}  // namespace attend

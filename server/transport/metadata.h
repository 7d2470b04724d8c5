// SPDX-License-Identifier: Apache-2.0
//
// gRPC's encoding of metadata, deadlines and status messages in HTTP/2 headers.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"

namespace attend {

// Keys and values in order of arrival; keys may repeat. Keys are lower case. The value of a key
// that ends in -bin is raw bytes, sent as base64.
class CallMetadata {
 public:
  using Entry = std::pair<std::string_view, std::string_view>;

  void Add(std::string_view key, std::string_view value) {
    const size_t begin = text_.size();
    text_.append(key).append(value);
    lengths_.push_back({begin, key.size(), value.size()});
  }
  // The first value of the key.
  std::optional<std::string_view> Find(std::string_view key) const;
  size_t size() const { return lengths_.size(); }
  // Views, valid until the next Add.
  Entry operator[](size_t i) const {
    const Lengths& each = lengths_[i];
    const std::string_view text(text_);
    return {text.substr(each.begin, each.key), text.substr(each.begin + each.key, each.value)};
  }
  struct Iterator {
    const CallMetadata* of;
    size_t at;
    Entry operator*() const { return (*of)[at]; }
    Iterator& operator++() { return ++at, *this; }
    bool operator==(const Iterator& other) const { return at == other.at; }
  };
  Iterator begin() const { return {this, 0}; }
  Iterator end() const { return {this, size()}; }
  bool empty() const { return lengths_.empty(); }
  // Keeps its memory for reuse, unless that is large.
  void Clear() {
    lengths_.clear();
    text_.clear();
    if (text_.capacity() > kKeptBytes || lengths_.capacity() > kKeptEntries) *this = {};
  }

 private:
  static constexpr size_t kKeptBytes = 1024;
  static constexpr size_t kKeptEntries = 32;
  struct Lengths {
    size_t begin, key, value;
  };

  std::string text_;
  std::vector<Lengths> lengths_;
};

bool IsBinaryKey(std::string_view key);

// Without padding, as gRPC sends it.
std::string EncodeBase64(std::string_view bytes);
// With or without padding. Empty if it is not base64.
std::optional<std::string> DecodeBase64(std::string_view text);

// Adds the values of a received header; a binary one may contain several, separated by commas.
// False: a binary value is not base64.
bool AddReceived(std::string_view key, std::string_view value, CallMetadata& metadata);

// Encodes a status message for grpc-message: bytes outside printable ASCII, and '%', become %XX.
std::string PercentEncode(std::string_view message);

// The duration of a grpc-timeout, such as 100m for 0.1 s: at most eight digits and a unit. Empty if
// it is malformed.
std::optional<Duration> ParseTimeout(std::string_view text);

}  // namespace attend

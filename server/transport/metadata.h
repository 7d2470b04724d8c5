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
  using Entry = std::pair<std::string_view, std::string_view>;

  void Add(std::string_view key, std::string_view value) {
    const size_t begin = text_.size();
    text_.append(key).append(value);
    lengths_.push_back({begin, key.size(), value.size()});
  }
  // The first value of that key.
  std::optional<std::string_view> Find(std::string_view key) const;
  size_t size() const { return lengths_.size(); }
  // Views of it, until the next Add.
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
  // Keeps its memory for what is added next, unless that is much.
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

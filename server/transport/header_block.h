// SPDX-License-Identifier: Apache-2.0
//
// Metadata in nghttp2's form, valid during a call of one of its functions, which copies the text.

#pragma once

#include <nghttp2/nghttp2.h>

#include <array>
#include <cstdint>
#include <forward_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/transport/metadata.h"

namespace attend {

// A header made of string literals, which nghttp2 does not copy.
struct ConstantHeader {
  std::string_view name, value;
};

class HeaderBlock {
 public:
  // `first`, then `metadata`, which must outlive the block. Base64 of binary values is kept here.
  explicit HeaderBlock(const CallMetadata& metadata, std::span<const ConstantHeader> first = {})
      : size_(first.size() + metadata.size()) {
    if (size_ > few_.size()) many_.resize(size_);
    nghttp2_nv* to = many_.empty() ? few_.data() : many_.data();
    for (const ConstantHeader& header : first) {
      *to++ = {Bytes(header.name), Bytes(header.value), header.name.size(), header.value.size(),
               NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE};
    }
    for (const auto& [key, value] : metadata) {
      std::string_view sent = value;
      if (IsBinaryKey(key)) {
        sent = encoded_.emplace_front(EncodeBase64(value));
      }
      *to++ = {Bytes(key), Bytes(sent), key.size(), sent.size(), NGHTTP2_NV_FLAG_NONE};
    }
  }
  const nghttp2_nv* data() const { return many_.empty() ? few_.data() : many_.data(); }
  size_t size() const { return size_; }

 private:
  static uint8_t* Bytes(std::string_view text) {
    return reinterpret_cast<uint8_t*>(const_cast<char*>(text.data()));
  }

  const size_t size_;
  std::array<nghttp2_nv, 12> few_;  // used if all fit
  std::vector<nghttp2_nv> many_;
  std::forward_list<std::string> encoded_;  // a list, so that none moves
};

}  // namespace attend

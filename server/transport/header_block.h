// SPDX-License-Identifier: Apache-2.0
//
// Metadata as nghttp2 takes it, for as long as a call of one of its functions: it copies the text.

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

// A header of literals, which are not copied.
struct ConstantHeader {
  std::string_view name, value;
};

class HeaderBlock {
 public:
  // `first`, then `metadata`, which must outlive the block; that keeps the base64 of binary values
  // itself.
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
  std::array<nghttp2_nv, 12> few_;  // unless they are more
  std::vector<nghttp2_nv> many_;
  std::forward_list<std::string> encoded_;  // none of which moves
};

}  // namespace attend

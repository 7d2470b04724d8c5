// SPDX-License-Identifier: Apache-2.0
//
// Metadata as nghttp2 takes it, for as long as a call of one of its functions: it copies the text.

#pragma once

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/transport/metadata.h"

namespace attend {

class HeaderBlock {
 public:
  // `metadata` must outlive the block, which keeps the base64 of binary values itself.
  explicit HeaderBlock(const CallMetadata& metadata) {
    encoded_.reserve(metadata.entries().size());  // so that none moves
    block_.reserve(metadata.entries().size());
    for (const auto& [key, value] : metadata.entries()) {
      std::string_view sent = value;
      if (IsBinaryKey(key)) sent = encoded_.emplace_back(EncodeBase64(value));
      block_.push_back({Bytes(key), Bytes(sent), key.size(), sent.size(), NGHTTP2_NV_FLAG_NONE});
    }
  }
  const nghttp2_nv* data() const { return block_.data(); }
  size_t size() const { return block_.size(); }

 private:
  static uint8_t* Bytes(std::string_view text) {
    return reinterpret_cast<uint8_t*>(const_cast<char*>(text.data()));
  }

  std::vector<std::string> encoded_;
  std::vector<nghttp2_nv> block_;
};

}  // namespace attend

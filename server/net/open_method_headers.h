// SPDX-License-Identifier: Apache-2.0
//
// Finds the calls of a connection that are of certain methods, by their headers (HPACK, which
// libnghttp2 decodes). All blocks of headers must pass here, as each may refer to those before it.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

struct nghttp2_hd_inflater;

namespace attend {

class OpenMethodHeaders {
 public:
  // The paths must outlive the object.
  explicit OpenMethodHeaders(std::span<const std::string_view> paths);

  // A frame of HEADERS begins, or one that continues it. Returns null, or what is wrong.
  const char* Begin(bool continues, uint8_t flags, int32_t length);
  // The next bytes of that frame's payload.
  const char* Read(std::span<const uint8_t> payload);
  // Whether a block has ended with what came last, of a call of one of the methods.
  bool found() const { return ended_ && found_; }

 private:
  struct Delete {
    void operator()(nghttp2_hd_inflater* inflater) const;
  };

  const char* Decode(std::span<const uint8_t> fragment);

  const std::span<const std::string_view> paths_;
  const std::unique_ptr<nghttp2_hd_inflater, Delete> inflater_;  // null: there was no memory
  bool padded_ = false;                                          // the next byte says how much
  int32_t skip_ = 0;  // bytes of the frame before its fragment of the block
  int32_t fragment_left_ = 0;
  bool last_ = false;  // fragment of the block
  bool ended_ = false;
  bool found_ = false;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Finds which methods the calls of a connection are of, by their headers (HPACK, which libnghttp2
// decodes). All blocks of headers must pass here, as each may refer to those before it.

#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct nghttp2_hd_inflater;

namespace attend {

// A method whose calls may bring so many bytes each, all of their messages together, and so many in
// one message.
struct MethodBound {
  static constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();
  std::string path;
  int64_t bytes_max = kUnbounded;
  int64_t message_max = kUnbounded;
};

class MethodHeaders {
 public:
  // There is one at least; they must outlive the object.
  explicit MethodHeaders(std::span<const MethodBound> bounds);

  // A frame of HEADERS without padding begins, or one that continues it. Returns null, or what is
  // wrong.
  const char* Begin(bool continues, uint8_t flags, int32_t length);
  // The next bytes of that frame's payload.
  const char* Read(std::span<const uint8_t> payload);
  // The bound of the call whose block has ended with what came last: its method's, or the one that
  // allows least where no bound has its path. Null: none has ended.
  const MethodBound* found() const { return ended_ ? found_ : nullptr; }

 private:
  struct Delete {
    void operator()(nghttp2_hd_inflater* inflater) const;
  };

  const char* Decode(std::span<const uint8_t> fragment);

  const MethodBound& Find(std::string_view path) const;

  const std::span<const MethodBound> bounds_;
  const MethodBound* const smallest_;
  const std::unique_ptr<nghttp2_hd_inflater, Delete> inflater_;  // null: there was no memory
  int32_t skip_ = 0;  // bytes of the frame before its fragment of the block
  int32_t fragment_left_ = 0;
  bool last_ = false;  // fragment of the block
  bool ended_ = false;
  const MethodBound* found_ = nullptr;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/net/method_headers.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <utility>

namespace attend {
namespace {

constexpr uint8_t kEndHeaders = 0x4, kPriority = 0x20;
constexpr int32_t kPriorityBytes = 5;
constexpr char kUndecodable[] = "headers that cannot be decoded";

nghttp2_hd_inflater* MakeInflater() {
  nghttp2_hd_inflater* made = nullptr;
  return nghttp2_hd_inflate_new(&made) == 0 ? made : nullptr;
}

bool IsLess(const MethodBound& a, const MethodBound& b) {
  const auto message_max = [](const MethodBound& m) {
    return std::min(m.bytes_max, m.message_max);
  };
  return std::pair(message_max(a), a.bytes_max) < std::pair(message_max(b), b.bytes_max);
}

std::string_view View(const uint8_t* text, size_t length) {
  return {reinterpret_cast<const char*>(text), length};
}

}  // namespace

void MethodHeaders::Delete::operator()(nghttp2_hd_inflater* inflater) const {
  nghttp2_hd_inflate_del(inflater);
}

MethodHeaders::MethodHeaders(std::span<const MethodBound> bounds)
    : bounds_(bounds),
      smallest_(&*std::min_element(bounds.begin(), bounds.end(), IsLess)),
      inflater_(MakeInflater()) {}

const char* MethodHeaders::Begin(bool continues, uint8_t flags, int32_t length) {
  if (inflater_ == nullptr) return "no memory for its headers";
  if (!continues) found_ = nullptr;
  ended_ = false;
  skip_ = !continues && (flags & kPriority) != 0 ? kPriorityBytes : 0;
  fragment_left_ = length - skip_;
  last_ = (flags & kEndHeaders) != 0;
  if (fragment_left_ < 0) return kUndecodable;
  return length == 0 && last_ ? Decode({}) : nullptr;
}

const char* MethodHeaders::Read(std::span<const uint8_t> payload) {
  const auto skipped = std::min<size_t>(static_cast<size_t>(skip_), payload.size());
  skip_ -= static_cast<int32_t>(skipped);
  payload = payload.subspan(skipped);
  if (skip_ > 0 || ended_) return nullptr;
  const auto taken = std::min<size_t>(static_cast<size_t>(fragment_left_), payload.size());
  fragment_left_ -= static_cast<int32_t>(taken);
  return Decode(payload.first(taken));
}

const MethodBound& MethodHeaders::Find(std::string_view path) const {
  const auto found = std::find_if(bounds_.begin(), bounds_.end(),
                                  [&](const MethodBound& each) { return each.path == path; });
  return found == bounds_.end() ? *smallest_ : *found;
}

const char* MethodHeaders::Decode(std::span<const uint8_t> fragment) {
  const bool final = last_ && fragment_left_ == 0;
  for (;;) {
    nghttp2_nv header{};
    int flags = 0;
    const ssize_t read = nghttp2_hd_inflate_hd2(inflater_.get(), &header, &flags, fragment.data(),
                                                fragment.size(), final ? 1 : 0);
    if (read < 0) return kUndecodable;
    fragment = fragment.subspan(static_cast<size_t>(read));
    if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
      if (View(header.name, header.namelen) == ":path") {
        const MethodBound& bound = Find(View(header.value, header.valuelen));
        // Of several paths the one that allows least, whichever gRPC takes.
        if (found_ == nullptr || IsLess(bound, *found_)) found_ = &bound;
      }
      continue;
    }
    if ((flags & NGHTTP2_HD_INFLATE_FINAL) != 0) {
      nghttp2_hd_inflate_end_headers(inflater_.get());
      ended_ = true;
      if (found_ == nullptr) found_ = smallest_;
      return nullptr;
    }
    if (fragment.empty()) return nullptr;
  }
}

}  // namespace attend

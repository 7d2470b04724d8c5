// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_slices.h"

#include <cstring>

#include "server/util/thresholds.h"

namespace attend {

bool HeldSlices::Take(grpc::ByteBuffer& message) {
  list_.clear();
  message_.Swap(&message);
  message.Clear();
  return message_.Dump(&list_).ok();
}

void HeldSlices::Replace(grpc::Slice whole) {
  list_ = std::vector<grpc::Slice>();  // frees the vector's memory too
  message_.Clear();
  list_.push_back(std::move(whole));
}

bool MessageSlices::Take(grpc::ByteBuffer& message) {
  bytes_ = static_cast<int64_t>(message.Length());
  if (!slices_.Take(message)) return false;
  if (std::ssize(slices_.list()) >
      thresholds::kSlicesFree + bytes_ / thresholds::kSliceBytesLeast) {
    Join();
  }
  spans_.reserve(slices_.list().size());
  for (const grpc::Slice& slice : slices_.list()) spans_.emplace_back(slice.begin(), slice.size());
  return true;
}

void MessageSlices::Join() {
  grpc::Slice whole(static_cast<size_t>(bytes_));
  auto* out = const_cast<uint8_t*>(whole.begin());
  for (const grpc::Slice& slice : slices_.list()) {
    std::memcpy(out, slice.begin(), slice.size());
    out += slice.size();
  }
  slices_.Replace(std::move(whole));
}

void MessageSlices::Own() {
  if (!lent()) return;
  slices_.Replace(grpc::Slice(lent_.data(), lent_.size()));
  const grpc::Slice& own = slices_.list().front();
  const ByteSpan span(own.begin(), own.size());
  if (spans_.empty()) {
    spans_.push_back(span);
  } else {
    spans_.front() = span;
  }
  lent_ = {};
}

void MessageSlices::Release() {
  lent_ = {};
  spans_.clear();
  const HeldSlices released = std::move(slices_);
}

}  // namespace attend

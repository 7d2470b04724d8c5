// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_slices.h"

#include <cstring>

#include "server/util/thresholds.h"

namespace attend {
bool MessageSlices::Take(grpc::ByteBuffer& message) {
  bytes_ = static_cast<int64_t>(message.Length());
  if (!message.Dump(&slices_).ok()) return false;
  message.Clear();
  if (static_cast<int64_t>(slices_.size()) >
      thresholds::kSlicesFree + bytes_ / thresholds::kSliceBytesLeast)
    Join();
  spans_.reserve(slices_.size());
  for (const grpc::Slice& slice : slices_) spans_.emplace_back(slice.begin(), slice.size());
  return true;
}

void MessageSlices::Join() {
  grpc::Slice whole(static_cast<size_t>(bytes_));
  auto* out = const_cast<uint8_t*>(whole.begin());
  for (const grpc::Slice& slice : slices_) {
    std::memcpy(out, slice.begin(), slice.size());
    out += slice.size();
  }
  slices_ = std::vector<grpc::Slice>();  // frees the vector's memory too
  slices_.push_back(std::move(whole));
}

void MessageSlices::Release() {
  spans_.clear();
  slices_.clear();
}

}  // namespace attend

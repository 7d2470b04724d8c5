// SPDX-License-Identifier: Apache-2.0

#include "server/transport/message_assembler.h"

#include <algorithm>
#include <cstring>

namespace attend {
namespace {

// A message up to this is given its memory at once.
constexpr size_t kReserveBytesMax = size_t{64} << 10;

}  // namespace

Status MessageAssembler::TakePrefix(std::string_view& bytes) {
  const size_t taken = std::min(bytes.size(), kPrefixBytes - prefix_bytes_);
  memcpy(prefix_ + prefix_bytes_, bytes.data(), taken);
  prefix_bytes_ += taken;
  bytes.remove_prefix(taken);
  if (prefix_bytes_ > 0 && prefix_[0] > 1) {
    return Internal("a message begins with flag " + std::to_string(prefix_[0]) +
                    ", must be 0 or 1");
  }
  if (prefix_bytes_ < kPrefixBytes) return Status();
  length_ = size_t{prefix_[1]} << 24 | size_t{prefix_[2]} << 16 | size_t{prefix_[3]} << 8 |
            size_t{prefix_[4]};
  if (static_cast<int64_t>(length_) > message_bytes_max_) {
    return ResourceExhausted("a message has " + std::to_string(length_) +
                             " bytes, must have at most " + std::to_string(message_bytes_max_));
  }
  if (prefix_[0] == 1) {
    return Unimplemented("a message is compressed by '" + encoding_ +
                         "', must have the encoding identity");
  }
  return Status();
}

Status MessageAssembler::Take(std::string_view& bytes, InMessage& message, bool& whole) {
  whole = false;
  if (prefix_bytes_ < kPrefixBytes) {
    ATTEND_RETURN_IF_ERROR(TakePrefix(bytes));
    if (prefix_bytes_ < kPrefixBytes) return Status();
  }
  if (gathered_ == nullptr && bytes.size() >= length_) {
    message = {bytes.substr(0, length_), nullptr};
    bytes.remove_prefix(length_);
  } else {
    if (bytes.empty()) return Status();
    if (gathered_ == nullptr) {
      gathered_ = std::make_shared<std::string>();
      gathered_->reserve(std::min(length_, kReserveBytesMax));
    }
    const size_t taken = std::min(bytes.size(), length_ - gathered_->size());
    gathered_->append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if (gathered_->size() < length_) return Status();
    message.owner = std::move(gathered_);
    message.bytes = *message.owner;
    gathered_ = nullptr;
  }
  prefix_bytes_ = 0;
  whole = true;
  return Status();
}

}  // namespace attend

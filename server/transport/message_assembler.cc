// SPDX-License-Identifier: Apache-2.0

#include "server/transport/message_assembler.h"

#include <algorithm>
#include <cstring>

namespace attend {
namespace {

// A block of a message that is gathered; its last one has no more than is missing.
constexpr size_t kBlockBytesMax = size_t{256} << 10;

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

void MessageAssembler::Gather(std::string_view& bytes) {
  while (!bytes.empty() && gathered_bytes_ < length_) {
    if (blocks_.empty() || blocks_.back()->size() == blocks_.back()->capacity()) {
      auto block = std::make_shared<std::string>();
      block->reserve(std::min(length_ - gathered_bytes_, kBlockBytesMax));
      held_bytes_ += static_cast<int64_t>(block->capacity());
      blocks_.push_back(std::move(block));
    }
    std::string& block = *blocks_.back();
    const size_t taken =
        std::min({bytes.size(), length_ - gathered_bytes_, block.capacity() - block.size()});
    block.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    gathered_bytes_ += taken;
  }
}

Status MessageAssembler::Take(std::string_view& bytes, InMessage& message, bool& whole) {
  whole = false;
  if (prefix_bytes_ < kPrefixBytes) {
    ATTEND_RETURN_IF_ERROR(TakePrefix(bytes));
    if (prefix_bytes_ < kPrefixBytes) return Status();
  }
  if (gathered_bytes_ == 0 && bytes.size() >= length_) {
    message = {bytes.substr(0, length_), {}};
    bytes.remove_prefix(length_);
  } else {
    Gather(bytes);
    if (gathered_bytes_ < length_) return Status();
    message.bytes = {};
    message.blocks.assign(blocks_.begin(), blocks_.end());
    blocks_.clear();
    gathered_bytes_ = 0;
    held_bytes_ = 0;
  }
  prefix_bytes_ = 0;
  whole = true;
  return Status();
}

}  // namespace attend

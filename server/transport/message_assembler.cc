// SPDX-License-Identifier: Apache-2.0

#include "server/transport/message_assembler.h"

#include <algorithm>
#include <cstring>

#include "server/util/thresholds.h"

namespace attend {
namespace {

// A piece that is copied together; the last one has no more than is missing.
constexpr size_t kCopiedBytesMax = size_t{256} << 10;
// From here on a piece costs less where it lies than copied.
constexpr size_t kReferredBytesMin = 2048;

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

void MessageAssembler::Copy(std::string_view bytes, size_t piece_bytes_max) {
  while (!bytes.empty()) {
    if (copied_ == nullptr || copied_->size() == copied_->capacity()) {
      copied_ = std::make_shared<std::string>();
      copied_->reserve(std::min(length_ - gathered_bytes_, piece_bytes_max));
      held_bytes_ += static_cast<int64_t>(copied_->capacity());
      pieces_.push_back({{}, copied_});
    }
    const size_t taken = std::min(bytes.size(), copied_->capacity() - copied_->size());
    copied_->append(bytes.substr(0, taken));
    pieces_.back().bytes = *copied_;
    bytes.remove_prefix(taken);
    gathered_bytes_ += taken;
  }
}

void MessageAssembler::Gather(std::string_view& bytes, ReadBlock* block) {
  const std::string_view ours = bytes.substr(0, length_ - gathered_bytes_);
  bytes.remove_prefix(ours.size());
  if (block == nullptr) return Copy(ours, kCopiedBytesMax);
  // Between pieces that are referred to, with room for a few of its kind.
  if (ours.size() < kReferredBytesMin) return Copy(ours, 2 * kReferredBytesMin);
  copied_.reset();
  pieces_.push_back({ours, block->memory});
  block->referenced_bytes += ours.size();
  held_bytes_ += static_cast<int64_t>(ours.size());
  gathered_bytes_ += ours.size();
}

Status MessageAssembler::Take(std::string_view& bytes, ReadBlock* block, InMessage& message,
                              bool& whole) {
  whole = false;
  if (prefix_bytes_ < kPrefixBytes) {
    ATTEND_RETURN_IF_ERROR(TakePrefix(bytes));
    if (prefix_bytes_ < kPrefixBytes) return Status();
  }
  const bool readable_in_place =
      block != nullptr && static_cast<int64_t>(length_) >= thresholds::kGatheredBytesMin;
  if (gathered_bytes_ == 0 && bytes.size() >= length_ && !readable_in_place) {
    message = {bytes.substr(0, length_), {}};
    bytes.remove_prefix(length_);
  } else {
    Gather(bytes, block);
    if (gathered_bytes_ < length_) return Status();
    message = {{}, std::exchange(pieces_, {})};
    copied_.reset();
    gathered_bytes_ = 0;
    held_bytes_ = 0;
  }
  prefix_bytes_ = 0;
  whole = true;
  return Status();
}

void MessageAssembler::Drop() {
  pieces_ = {};
  copied_.reset();
  gathered_bytes_ = prefix_bytes_ = 0;
  held_bytes_ = 0;
}

}  // namespace attend

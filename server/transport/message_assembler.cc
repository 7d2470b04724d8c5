// SPDX-License-Identifier: Apache-2.0
//
// Each byte goes the cheapest way it can: to its place, if the handler gave it one; else it is
// referenced in the read block; else it is copied. The capacity of a copied piece is bounded, and
// never exceeds what is still missing, so an announced length reserves little. Invariant:
// gathered_bytes_ is the position in the message, and place_ the first place that ends after it.

#include "server/transport/message_assembler.h"

#include <algorithm>
#include <cstring>

#include "server/util/thresholds.h"

namespace attend {
namespace {

// Maximum size of a copied piece; the last one is only as large as needed.
constexpr size_t kCopiedBytesMax = size_t{256} << 10;
// From this size on the handler is asked for places, because the message takes several reads.
constexpr size_t kPlacedBytesMin = size_t{512} << 10;
// From this size on, referring to a piece is cheaper than copying it.
constexpr size_t kReferredBytesMin = 2048;

}  // namespace

Status MessageAssembler::TakePrefix(std::string_view& bytes) {
  const size_t taken = std::min(bytes.size(), kPrefixBytes - prefix_bytes_);
  memcpy(prefix_ + prefix_bytes_, bytes.data(), taken);
  prefix_bytes_ += taken;
  bytes.remove_prefix(taken);
  if (prefix_bytes_ > 0 && prefix_[0] > 1) {
    return Internal("a message's compressed flag is " + std::to_string(prefix_[0]) +
                    ", must be 0 or 1");
  }
  if (prefix_bytes_ < kPrefixBytes) return Status();
  length_ = size_t{prefix_[1]} << 24 | size_t{prefix_[2]} << 16 | size_t{prefix_[3]} << 8 |
            size_t{prefix_[4]};
  if (static_cast<int64_t>(length_) > bound_.bytes) {
    const std::string origin = *bound_.origin == 0 ? "" : " (" + std::string(bound_.origin) + ")";
    return ResourceExhausted("a message has " + std::to_string(length_) +
                             " bytes, must have at most " + std::to_string(bound_.bytes) + origin);
  }
  if (prefix_[0] == 1) {
    return Unimplemented("a message is compressed with '" + encoding_ +
                         "', must not be compressed (identity)");
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
    Advance(taken);
  }
}

void MessageAssembler::Refer(std::string_view bytes, ReadBlock& block) {
  copied_.reset();
  pieces_.push_back({bytes, block.memory});
  block.referenced_bytes += bytes.size();
  held_bytes_ += static_cast<int64_t>(bytes.size());
  Advance(bytes.size());
}

void MessageAssembler::Settle(std::string_view bytes) {
  char* const to = Room().data();
  if (bytes.data() != to) memcpy(to, bytes.data(), bytes.size());
  copied_.reset();
  // Not empty: it has at least the bytes that Place was called with.
  std::string_view& last = pieces_.back().bytes;
  if (last.data() + last.size() == to && pieces_.back().owner == places_) {
    last = {last.data(), last.size() + bytes.size()};
  } else {
    pieces_.push_back({{to, bytes.size()}, places_});
  }
  held_bytes_ += static_cast<int64_t>(bytes.size());
  Advance(bytes.size());
}

void MessageAssembler::Gather(std::string_view& bytes, ReadBlock* block) {
  std::string_view ours = bytes.substr(0, length_ - gathered_bytes_);
  bytes.remove_prefix(ours.size());
  while (!ours.empty()) {
    const size_t room = Room().size();
    const std::string_view next = ours.substr(0, room > 0 ? room : BytesToPlace());
    ours.remove_prefix(next.size());
    // A copied piece between referenced ones gets room for a few more like it.
    constexpr size_t kBetween = 2 * kReferredBytesMin;
    if (room > 0) {
      Settle(next);
    } else if (placed()) {
      Copy(next, kBetween);
    } else if (block == nullptr) {
      Copy(next, MayBePlaced() ? next.size() : kCopiedBytesMax);
    } else if (next.size() < kReferredBytesMin) {
      Copy(next, kBetween);
    } else {
      Refer(next, *block);
    }
  }
}

// Bytes from the next one, which has no place, to the first one that has.
size_t MessageAssembler::BytesToPlace() const {
  if (!placed() || place_ == places_->places.size()) return std::string_view::npos;
  return static_cast<size_t>(places_->places[place_].begin) - gathered_bytes_;
}

void MessageAssembler::Advance(size_t bytes) {
  gathered_bytes_ += bytes;
  if (!placed()) return;
  const std::vector<MessagePlaces::Place>& all = places_->places;
  while (place_ < all.size() &&
         static_cast<size_t>(all[place_].begin + all[place_].bytes) <= gathered_bytes_) {
    ++place_;
  }
}

bool MessageAssembler::MayBePlaced() const { return !place_asked_ && length_ >= kPlacedBytesMin; }

void MessageAssembler::Place(std::shared_ptr<MessagePlaces> places) {
  place_asked_ = true;
  places_ = std::move(places);
  place_ = 0;
  Advance(0);
}

std::span<char> MessageAssembler::Room() const {
  if (!placed() || place_ == places_->places.size()) return {};
  const MessagePlaces::Place& place = places_->places[place_];
  const int64_t in = static_cast<int64_t>(gathered_bytes_) - place.begin;
  if (in < 0) return {};
  return {place.to + in, static_cast<size_t>(place.bytes - in)};
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
    message = {{}, std::exchange(pieces_, {}), std::move(places_)};
    Drop();
  }
  prefix_bytes_ = 0;
  whole = true;
  return Status();
}

void MessageAssembler::Drop() {
  pieces_ = {};
  places_.reset();
  place_asked_ = false;
  copied_.reset();
  gathered_bytes_ = prefix_bytes_ = 0;
  held_bytes_ = 0;
}

}  // namespace attend

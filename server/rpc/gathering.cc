// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/gathering.h"

#include <cstring>
#include <utility>

#include "server/memory/copy_pieces.h"
#include "server/util/thresholds.h"

namespace attend {
namespace {

// At most 1 / kElsewhereShare of a message may lie outside receive memory.
constexpr int64_t kElsewhereShare = 8;

}  // namespace

// A kept message and its part of held_bytes_max_.
struct Gathering::HeldMessage {
  HeldMessage(std::vector<MessagePiece> message, std::shared_ptr<std::atomic<int64_t>> sum,
              int64_t bytes)
      : pieces(std::move(message)), held(std::move(sum)), message_bytes(bytes) {}
  ~HeldMessage() { held->fetch_sub(message_bytes, std::memory_order_relaxed); }
  const std::vector<MessagePiece> pieces;
  const std::shared_ptr<std::atomic<int64_t>> held;
  const int64_t message_bytes;
};

Gathering::Gathering(const ReceiveMemory* receive_memory, int64_t held_bytes_max)
    : receive_memory_(receive_memory),
      held_bytes_max_(held_bytes_max),
      held_(std::make_shared<std::atomic<int64_t>>(0)) {}

bool Gathering::MayKeep(const Request& request) const {
  if (receive_memory_ == nullptr || request.file_bytes.input > 0) return false;
  const int64_t bytes = request.message_bytes;
  if (bytes < thresholds::kGatheredBytesMin || bytes > thresholds::kGatheredBytesMax) return false;
  return request.input.data() != nullptr && request.placement.may_gather;
}

bool Gathering::Readable(const HostPiece& piece) const {
  return receive_memory_->Contains(piece.from, piece.bytes);
}

bool Gathering::Keep(MessageSlices& slices, std::vector<HostPiece> pieces, Request& request) const {
  const int64_t bytes = request.message_bytes;
  int64_t elsewhere_bytes = 0;
  for (const HostPiece& piece : pieces) elsewhere_bytes += Readable(piece) ? 0 : piece.bytes;
  const bool readable =
      elsewhere_bytes <= bytes / kElsewhereShare && StaysOnThread(elsewhere_bytes);
  const int64_t pieces_max =
      thresholds::kGatheredPiecesFree + bytes / thresholds::kGatheredPieceBytesLeast;
  if (!readable || std::ssize(pieces) > pieces_max) return false;
  if (held_->fetch_add(bytes, std::memory_order_relaxed) + bytes > held_bytes_max_) {
    held_->fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }
  // Pieces at block edges were copied by the transport. Copy them to the input block, which devices
  // can read.
  for (HostPiece& piece : pieces) {
    if (Readable(piece)) continue;
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    piece.from = piece.to;
  }
  auto owner = std::make_shared<HeldMessage>(slices.TakePieces(), held_, bytes);
  request.source.Gather({std::move(pieces), std::move(owner)});
  return true;
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "client/wire/piece_order.h"

#include <algorithm>
#include <cassert>

namespace attend::client {
namespace {

// More than any tensor has at 2 MiB each; its square fits 64 bits.
constexpr int64_t kRunsMax = int64_t{1} << 30;
// Less than this part of a run is not worth messages of its own: one query row beside many keys.
constexpr int64_t kSmallShare = 8;

}  // namespace

PieceOrder::PieceOrder(const std::vector<Tensor>& tensors, int64_t run_bytes_min) {
  assert(run_bytes_min > 0);
  int64_t largest = 0;
  int64_t units = kRunsMax;
  for (Tensor tensor : tensors) {
    if (tensor.bytes < run_bytes_min / kSmallShare) tensor.units = 1;
    tracks_.push_back({static_cast<int>(tracks_.size()), tensor, 0});
    if (tensor.units <= 1) continue;
    largest = std::max(largest, tensor.bytes);
    units = std::min(units, tensor.units);
  }
  std::stable_partition(tracks_.begin(), tracks_.end(),
                        [](const Track& track) { return track.tensor.units <= 1; });
  runs_ = std::clamp<int64_t>(largest / run_bytes_min, 1, units);
}

// Where a tensor's part of the present run ends: at unit floor(i * units / runs_), the next run
// being the i-th.
int64_t PieceOrder::RunEnd(const Tensor& tensor) const {
  const int64_t i = run_ + 1;
  if (tensor.units <= 1 || i == runs_) return tensor.bytes;
  // Whose product may not fit 64 bits.
  const int64_t unit = tensor.units / runs_ * i + tensor.units % runs_ * i / runs_;
  return tensor.bytes / tensor.units * unit;
}

std::optional<PieceOrder::Piece> PieceOrder::Next(int64_t bytes_max) {
  assert(bytes_max > 0);
  for (; run_ < runs_; ++run_, track_ = 0) {
    for (; track_ < tracks_.size(); ++track_) {
      Track& track = tracks_[track_];
      const int64_t left = RunEnd(track.tensor) - track.taken;
      if (left <= 0) continue;
      const Piece piece{track.index, track.taken, std::min(left, bytes_max)};
      track.taken += piece.bytes;
      return piece;
    }
  }
  return std::nullopt;
}

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// The order in which the bytes of a call in chunks are sent. Each tensor is cut into the same
// number of runs, and run 0 of all of them is sent before run 1 of any: so heads become complete
// one after another, and the server can compute the first ones while the others are in transit. A
// plain value, pure; a copy continues from the original's position. Not thread-safe.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace attend::client {

class PieceOrder {
 public:
  // Bytes of one message: enough that the overhead does not matter, few enough to spread out.
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;

  struct Tensor {
    int64_t bytes = 0;
    // Equal consecutive parts between which it may be cut: heads or sequences, the same number in
    // every tensor that is cut. 1: it is sent whole, before those that are cut.
    int64_t units = 1;
  };
  struct Piece {
    int tensor = 0;  // its place in the list
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  PieceOrder() = default;  // of nothing
  // Whatever the units, each byte comes once. Runs of the largest tensor that is cut have about
  // `run_bytes_min` bytes or more: shorter ones would only make smaller pieces. What has far fewer
  // goes whole.
  explicit PieceOrder(const std::vector<Tensor>& tensors, int64_t run_bytes_min = kPieceBytes);

  // What to send next, at most `bytes_max` > 0 of it. Nothing, for good, once all was given out.
  std::optional<Piece> Next(int64_t bytes_max);

 private:
  struct Track {
    int index = 0;
    Tensor tensor;
    int64_t taken = 0;  // bytes, from the first on
  };
  int64_t RunEnd(const Tensor& tensor) const;

  std::vector<Track> tracks_;  // those that go whole first
  int64_t runs_ = 0;
  int64_t run_ = 0;   // whose pieces are given out now
  size_t track_ = 0;  // of that run
};

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Inputs and outputs of the backward pass besides an Attention's, in their own memory. dQ, dK, dV
// and dO have the strides of Q, K, V and O. Memory that must not be read holds NaN, and memory that
// must not be written a pattern.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/contract/gradients.h"

namespace attend::test {

class OwnedGradients {
 public:
  // dO and dLSE drawn from `seed`; room for every possible gradient, filled with NaN. The attention
  // must outlive this, and is on the host.
  OwnedGradients(const Attention& attention, uint64_t seed);
  OwnedGradients(OwnedGradients&&) = default;

  const Gradients& get() const { return gradients_; }
  Gradients& get() { return gradients_; }

  // All of it, to compare two runs from one seed bit for bit.
  std::vector<std::byte> Bytes() const;

  // Its memory, piece by piece, to be mirrored elsewhere.
  std::vector<std::vector<std::byte>>& blocks() { return blocks_; }

  // False if anything but the gradients' elements was written.
  bool GuardsIntact() const;

 private:
  // A tensor's elements that count: rows of `dim`, by sequence, head and row.
  struct Shape {
    bool keys = false;  // rows of K and V
    int64_t heads = 0;
    int64_t dim = 0;
    bool padding = true;  // rows beyond the length are written too
  };

  template <class Visit>
  void ForEachRow(const Shape& shape, const TensorView& view, Visit visit) const;
  TensorView Make(const Shape& shape, DType dtype, const ConstTensorView& like);

  const Attention& a_;
  Gradients gradients_;
  std::vector<std::vector<std::byte>> blocks_;
  std::vector<std::vector<bool>> writable_;  // by block, byte by byte
};

}  // namespace attend::test

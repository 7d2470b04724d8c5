// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/launch/repack.h"

#include "kernels/cuda/ragged/operands.h"
#include "kernels/cuda/ragged/tensor_maps.h"

namespace attend::cuda {

MemoryTraits TraitsOf(const Attention& a) {
  MemoryTraits traits{.not_tma = WhyNotTma(a)};
  if (traits.not_tma.empty()) return traits;
  for (const Operand& each : OperandsOf(a)) {
    if (!each.copied) continue;
    const Result<int64_t> bytes =
        RepackedBytes(a.problem.packed ? 1 : a.problem.batch, each.heads, each.rows, each.columns);
    if (!bytes.ok() || __builtin_add_overflow(traits.repack_bytes, *bytes, &traits.repack_bytes)) {
      return {.not_tma = traits.not_tma};
    }
  }
  return traits;
}

int64_t RepackBytes(KernelId kernel, const Attention& a) {
  return ReadsAligned(kernel) ? TraitsOf(a).repack_bytes : 0;
}

void Repack(KernelId kernel, Attention* a, char** workspace, std::vector<RepackPiece>* pieces) {
  if (!ReadsAligned(kernel) || TraitsOf(*a).repack_bytes == 0) return;
  const Problem& p = a->problem;
  ConstTensorView* const views[] = {&a->q, &a->k, &a->v};
  const std::array<Operand, 3> operands = OperandsOf(*a);
  for (size_t n = 0; n < operands.size(); ++n) {
    const Operand& from = operands[n];
    if (!from.copied) continue;
    RepackPiece piece;
    piece.tensor = from.view;
    // A broadcast dimension stays broadcast.
    piece.shape = {p.packed || from.view.stride_b == 0 ? 1 : p.batch,
                   from.view.stride_h == 0 ? 1 : from.heads, from.rows, from.columns};
    const bool each = !p.packed && from.view.stride_b != 0;
    piece.lengths = each ? (n == 0 ? a->q_lengths : a->kv_lengths) : nullptr;
    piece.copy = *workspace;
    ConstTensorView& view = *views[n];
    view.data = piece.copy;
    view.stride_l = RepackedColumns(from.columns);
    if (view.stride_h != 0) view.stride_h = from.rows * view.stride_l;
    if (view.stride_b != 0) view.stride_b = piece.shape.heads * from.rows * view.stride_l;
    *workspace += *RepackedBytes(p.packed ? 1 : p.batch, from.heads, from.rows, from.columns);
    pieces->push_back(piece);
  }
}

}  // namespace attend::cuda

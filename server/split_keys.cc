// SPDX-License-Identifier: Apache-2.0

#include "server/split_keys.h"

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/dtype.h"
#include "kernels/limits.h"
#include "kernels/softmax_state.h"

namespace attend {
namespace {

// Parts' elements of O, of all parts, some nanoseconds each on a host thread; a row costs as much
// as so many of them besides.
constexpr double kMergedElementsMax = 0x1p22;
constexpr double kRowElements = 64;
// What they may be of the elements of K and V where nothing else divides the work; and where the
// work is divided, but not K and V: they take a host thread some hundred times as long as a bus.
constexpr double kMergedShareMax = 0.25;
constexpr double kMergedShareMaxInstead = 1.0 / 128;

// The last key that the first row sees, as a count: ranges that end here or before are seen by all
// rows in full.
int64_t KeysOfFirstRow(const Problem& p) {
  if (p.mask.unrestricted()) return p.len_k;
  // Any more is as much, and may be as large as 64 bits hold.
  return p.len_k - p.len_q + std::min(p.mask.right, p.len_q + p.len_k) + 1;
}

bool KeysCanBeCut(const Attention& a) {
  const Problem& p = a.problem;
  if (p.packed || p.has_alibi || a.q_lengths != nullptr || a.kv_lengths != nullptr) return false;
  if (p.batch == 0 || p.heads_q == 0 || p.len_q == 0 || p.dim_v == 0) return false;
  if (p.mask.unrestricted()) return true;
  return p.mask.left < 0 && p.mask.alignment == Alignment::kBottomRight;
}

bool MergingIsCheap(const Problem& p, int shares, double share_max) {
  const double rows = static_cast<double>(p.batch) * p.heads_q * p.len_q;
  const double keys = static_cast<double>(p.batch) * p.heads_kv * p.len_k;
  return shares * rows * (p.dim_v + kRowElements) <= kMergedElementsMax &&
         shares * rows * p.dim_v <= share_max * keys * (p.dim + p.dim_v);
}

void MergeRow(std::span<const Attention> parts, const Attention& whole, int64_t b, int64_t h,
              int64_t i) {
  const Problem& p = whole.problem;
  const auto place = [&](const TensorView& o) {
    return b * o.stride_b + h * o.stride_h + i * o.stride_l;
  };
  SoftmaxState<double> state;
  std::array<double, kHeadDimMax> sum;
  std::array<float, kHeadDimMax> o;
  std::fill_n(sum.begin(), p.dim_v, 0.0);
  for (const Attention& part : parts) {
    const double lse = part.lse[b * part.lse_stride_b + h * part.lse_stride_h + i];
    if (lse == -std::numeric_limits<double>::infinity())
      continue;  // nothing that counts: its O may be anything
    LoadElements(part.o.data, p.dtype, place(part.o), p.dim_v, o.data());
    const MergeWeights<double> weights = Merge(state, SoftmaxState<double>{lse, 1.0});
    for (int64_t d = 0; d < p.dim_v; ++d) {
      sum[d] = weights.left * sum[d] + weights.right * static_cast<double>(o[d]);
    }
  }
  const double inverse = InverseSum(state);
  for (int64_t d = 0; d < p.dim_v; ++d) {
    StoreElement(whole.o.data, p.dtype, place(whole.o) + d, static_cast<float>(sum[d] * inverse));
  }
  if (p.return_lse) {
    whole.lse[b * whole.lse_stride_b + h * whole.lse_stride_h + i] =
        static_cast<float>(LogSumExp(state));
  }
}

// None if the largest range would be more than kLargestShareMax.
std::vector<SplitPiece> Ranges(const Problem& p, int shares, int64_t keys_multiple) {
  const int64_t last_cut = std::min(p.len_k - 1, KeysOfFirstRow(p));
  std::vector<int64_t> cuts = {0};
  for (int n = 1; n < shares; ++n) {
    const int64_t wanted = p.len_k / shares * n + p.len_k % shares * n / shares;
    const int64_t cut = std::min(wanted, last_cut) / keys_multiple * keys_multiple;
    if (cut > cuts.back()) cuts.push_back(cut);
  }
  cuts.push_back(p.len_k);
  std::vector<SplitPiece> pieces;
  for (size_t n = 0; n + 1 < cuts.size(); ++n) {
    const int64_t keys = cuts[n + 1] - cuts[n];
    if (static_cast<double>(keys) > kLargestShareMax * static_cast<double>(p.len_k)) return {};
    SplitPiece piece{static_cast<int>(n), 0, p.batch, 0, p.heads_q, 0, p.len_q};
    piece.keys_begin = cuts[n];
    piece.keys_end = cuts[n + 1];
    pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace

std::vector<SplitPiece> PlanKeySplit(const Attention& whole, int shares, int64_t keys_multiple) {
  const Problem& p = whole.problem;
  if (!KeysCanBeCut(whole)) return {};
  while (shares >= 2 && !MergingIsCheap(p, shares, kMergedShareMax)) --shares;
  return shares < 2 ? std::vector<SplitPiece>() : Ranges(p, shares, keys_multiple);
}

std::vector<SplitPiece> PlanSplitOrKeys(const Attention& whole, int shares, int64_t multiple) {
  const Problem& p = whole.problem;
  std::vector<SplitPiece> pieces = PlanSplit(whole, shares, multiple);
  const bool keys_shared = std::any_of(pieces.begin(), pieces.end(), [&](const SplitPiece& piece) {
    return piece.rows_end - piece.rows_begin < p.len_q ||
           (piece.heads_end - piece.heads_begin) % p.group() != 0;
  });
  if (!pieces.empty() && !(keys_shared && MergingIsCheap(p, shares, kMergedShareMaxInstead))) {
    return pieces;
  }
  std::vector<SplitPiece> by_keys = PlanKeySplit(whole, shares, multiple);
  return by_keys.empty() ? pieces : by_keys;
}

Attention TakeKeys(const Attention& whole, int64_t begin, int64_t end) {
  Attention part = whole;
  Problem& p = part.problem;
  const auto advance = [](const void* data, int64_t elements, DType dtype) {
    return static_cast<const char*>(data) + elements * DTypeBytes(dtype);
  };
  part.k.data = advance(whole.k.data, begin * whole.k.stride_l, p.dtype);
  part.v.data = advance(whole.v.data, begin * whole.v.stride_l, p.dtype);
  if (p.has_bias) part.bias.data = advance(whole.bias.data, begin, whole.bias.dtype);
  if (begin > 0) {
    p.has_sinks = false;
    part.sinks = nullptr;
  }
  // The diagonal ends at the last key, which only the last range has; the others lie before it.
  if (end < p.len_k) p.mask = Mask();
  p.len_k = end - begin;
  p.return_lse = true;
  return part;
}

void MergeKeys(std::span<const Attention> parts, const Attention& whole) {
  const Problem& p = whole.problem;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < p.len_q; ++i) MergeRow(parts, whole, b, h, i);
    }
  }
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/split/split_kv.h"

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/contract/dtype.h"
#include "kernels/contract/limits.h"
#include "kernels/contract/softmax_state.h"

namespace attend {
namespace {

// Parts' elements of O, of all parts, some nanoseconds each on a host thread; a row costs as much
// as so many of them besides.
constexpr double kMergedElementsMax = 0x1p22;
constexpr double kRowElements = 64;
// What they may be of the elements of K and V.
constexpr double kMergedShareMax = 0.25;
// In place of a plan without merging: at most so many, about a millisecond; and for each of them so
// many elements of K and V that no device is sent in vain, which a bus moves meanwhile.
constexpr double kMergedElementsMaxInstead = 0x1p19;
constexpr double kSavedPerMerged = 64;

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

// What merging so many parts works through.
double MergedElements(const Problem& p, int shares) {
  return static_cast<double>(shares) * p.batch * p.heads_q * p.len_q * (p.dim_v + kRowElements);
}

bool MergingIsCheap(const Problem& p, int shares) {
  const double rows = static_cast<double>(p.batch) * p.heads_q * p.len_q;
  const double keys = static_cast<double>(p.batch) * p.heads_kv * p.len_k;
  return MergedElements(p, shares) <= kMergedElementsMax &&
         shares * rows * p.dim_v <= kMergedShareMax * keys * (p.dim + p.dim_v);
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

// Elements of K and V that the share reads that reads most of them.
double MostRead(const Problem& p, std::span<const SplitPiece> pieces) {
  std::vector<double> read;
  for (const SplitPiece& piece : pieces) {
    read.resize(std::max(read.size(), static_cast<size_t>(piece.share) + 1));
    const int64_t heads =
        (piece.heads_end + p.group() - 1) / p.group() - piece.heads_begin / p.group();
    const int64_t keys = piece.some_keys() ? piece.keys_end - piece.keys_begin : p.len_k;
    read[static_cast<size_t>(piece.share)] +=
        static_cast<double>(piece.batch_end - piece.batch_begin) * heads * keys;
  }
  return *std::max_element(read.begin(), read.end()) * static_cast<double>(p.dim + p.dim_v);
}

}  // namespace

std::vector<SplitPiece> PlanKeySplit(const Attention& whole, int shares, int64_t keys_multiple) {
  const Problem& p = whole.problem;
  if (!KeysCanBeCut(whole)) return {};
  while (shares >= 2 && !MergingIsCheap(p, shares)) --shares;
  return shares < 2 ? std::vector<SplitPiece>() : Ranges(p, shares, keys_multiple);
}

std::vector<SplitPiece> PlanSplitOrKeys(const Attention& whole, int shares, int64_t multiple) {
  const Problem& p = whole.problem;
  std::vector<SplitPiece> pieces = PlanSplit(whole, shares, multiple);
  std::vector<SplitPiece> by_keys = PlanKeySplit(whole, shares, multiple);
  if (pieces.empty() || by_keys.empty()) return pieces.empty() ? by_keys : pieces;
  const double saved = MostRead(p, pieces) - MostRead(p, by_keys);
  const double merged = MergedElements(p, static_cast<int>(by_keys.size()));
  return merged <= kMergedElementsMaxInstead && kSavedPerMerged * merged <= saved ? by_keys
                                                                                  : pieces;
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

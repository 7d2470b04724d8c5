// SPDX-License-Identifier: Apache-2.0
//
// One attention as plain values (Problem), and with its memory (Attention): O = softmax(scale * Q
// K^T, capped, biased, masked) V for every sequence and head.
//
// B sequences, Hq query heads, Hkv key/value heads (Hq % Hkv == 0), Lq and Lk rows, D head dim of Q
// and K, Dv head dim of V and O. Query head h reads KV head h / (Hq / Hkv).
//
// Order of score terms: s = scale * q.k; s = softcap * tanh(s / softcap) if softcap > 0; s +=
// bias[b,h,i,j]; s -= slope[h] * |j - i - offset|; then the mask, and a bias of bits, remove keys;
// a sink is one extra logit per query head that joins the denominator only.
//
// NaN and Inf in the K and V of a removed key reach nothing. A bias of -inf gives a key weight 0
// and hides its V, but a NaN or +Inf score, from K, propagates as IEEE says. A finite bias removes
// no key.

#pragma once

#include <cmath>
#include <compare>
#include <cstdint>
#include <string>

#include "kernels/contract/dropout.h"
#include "kernels/contract/dtype.h"
#include "kernels/contract/portable.h"
#include "kernels/util/status.h"

namespace attend {

// The diagonal that causal masks, windows and ALiBi's distance are measured from: offset =
// kv_length - q_length (bottom-right, FlashAttention) or 0 (top-left, PyTorch SDPA).
enum class Alignment : int32_t { kBottomRight = 0, kTopLeft = 1 };

// Key j is visible to query i when -left <= j - i - offset <= right; -1 = no bound on that side.
// Causal is right = 0. Every query's visible keys are one contiguous range.
struct Mask {
  Alignment alignment = Alignment::kBottomRight;
  int64_t left = -1;
  int64_t right = -1;

  ATTEND_HD bool unrestricted() const { return left < 0 && right < 0; }
};

struct Problem {
  DType dtype = DType::kFloat32;  // of Q, K and V, and of O unless o_float32
  bool o_float32 = false;         // O is float32, so that partial answers merge without loss
  bool bias_bits = false;         // the bias is a mask of bits (BiasView)
  bool bias_as_q = false;         // the bias has `dtype`
  int64_t batch = 0;              // B, 0 allowed
  int64_t heads_q = 0;            // Hq
  int64_t heads_kv = 0;           // Hkv
  int64_t len_q = 0;              // Lq; packed: of the longest sequence
  int64_t len_k = 0;              // Lk; packed: of the longest sequence
  int64_t dim = 0;                // D
  int64_t dim_v = 0;              // Dv
  bool packed = false;            // sequences are stored end to end; q/kv_offsets delimit them
  int64_t total_q = 0;            // packed: rows of Q over all sequences
  int64_t total_k = 0;            // packed: rows of K over all sequences
  int64_t page_rows = 0;          // K and V are in pages of this many keys; 0: not paged
  int64_t key_offset = 0;
  int64_t keys_after = 0;  // keys of the whole after the part
  Mask mask;
  float scale = 0.0f;    // finite; the caller substitutes 1/sqrt(D) for a default
  float softcap = 0.0f;  // 0 = off, else > 0
  // The two before they were rounded, for float64; 0 if that has not been said (ExactScale).
  double scale64 = 0;
  double softcap64 = 0;
  // A weight is dropped with probability dropout / 65536, in [0, 65535] (dropout.h).
  int32_t dropout = 0;
  bool has_bias = false;
  bool has_alibi = false;
  bool has_sinks = false;
  bool return_lse = false;

  ATTEND_HD DType o_dtype() const { return o_float32 ? DType::kFloat32 : dtype; }
  ATTEND_HD int64_t group() const { return heads_q / heads_kv; }  // query heads per KV head
};

// The default scale: 1 / sqrt(dim), rounded once. Every entry point uses this function or the same
// expression (attend_kernels), so that all give the same bits.
inline float DefaultScale(int64_t dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
}

// The cap of scores: value * tanh(score / value).
template <class Number>
struct ScoreCap {
  Number value;  // 0: scores are not capped

  ATTEND_HD bool on() const { return value > 0; }
  ATTEND_HD Number Apply(Number score) const {
    return on() ? value * std::tanh(score / value) : score;
  }
  // The tanh of a capped score; the cap's slope is 1 minus its square.
  Number Share(Number capped) const { return on() ? capped / value : 0; }
};
ATTEND_HD inline ScoreCap<float> CapOf(const Problem& p) { return {p.softcap}; }

// Scale and cap in double: unrounded for float64, else the fp32 values.
inline double ExactScale(const Problem& p) {
  return p.scale64 != 0 ? p.scale64 : static_cast<double>(p.scale);
}
inline ScoreCap<double> ExactCap(const Problem& p) {
  return {p.softcap64 != 0 && p.softcap != 0 ? p.softcap64 : static_cast<double>(p.softcap)};
}

// Whether there are score terms between q.k and the mask: a cap, a bias or ALiBi.
inline bool HasScoreTerms(const Problem& p) { return CapOf(p).on() || p.has_bias || p.has_alibi; }

// Kernels that cap raw products have scores tanh(q.k * CapFactor), or q.k without a cap (factor 0),
// in units of ScoreUnit.
ATTEND_HD inline float ScoreUnit(const Problem& p) { return CapOf(p).on() ? p.softcap : p.scale; }
ATTEND_HD inline float CapFactor(const Problem& p) {
  return CapOf(p).on() ? p.scale / p.softcap : 0.0f;
}

// OK, or INVALID_ARGUMENT naming field, value and bound. Kernels only ever get a Problem that
// passes.
Status Check(const Problem& problem);

// a * b * c * d as int64, or INVALID_ARGUMENT naming `what` if a factor is negative or the product
// overflows.
Result<int64_t> CheckedProduct(std::string_view what, int64_t a, int64_t b, int64_t c = 1,
                               int64_t d = 1);

// Read-only and writable strided views of a [B, H, L, D] tensor. Strides count elements; the last
// dimension is contiguous. Packed tensors have stride_b = 0 and rows counted over all sequences.
struct ConstTensorView {
  const void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_l = 0;
};
struct TensorView {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_l = 0;
};

// Paged K and V: key j of sequence b is row j % page_rows of page pages[b * stride + j /
// page_rows], in K and in V. The views' stride_b is then the distance between pages, stride_h and
// stride_l are within a page. Every page number up to the sequence's length is valid; later ones
// are never read. Sequences may share pages.
struct PageTable {
  const int32_t* pages = nullptr;
  int64_t stride = 0;  // entries from one sequence to the next
};

// Additive bias [B|1, Hq|1, Lq|1, Lk]: a broadcast dimension has stride 0; Lk is contiguous. With
// dtype kBit it is a mask: a 0 bit removes the key, as Mask does; strides are multiples of 8.
struct BiasView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;  // may differ from the problem's
  int64_t stride_b = 0;
  int64_t stride_h = 0;
  int64_t stride_q = 0;
};

// One attention with its memory, which is the host's or reachable from one device. Non-owning.
struct Attention {
  Problem problem;
  ConstTensorView q, k, v;
  TensorView o;
  float* lse = nullptr;  // [B, Hq, Lq] (packed: [Hq, total_q]), last dim contiguous; if return_lse
  int64_t lse_stride_b = 0;
  int64_t lse_stride_h = 0;
  BiasView bias;                        // if has_bias
  const float* alibi_slopes = nullptr;  // [Hq] or [B, Hq]; if has_alibi
  int64_t alibi_stride_b = 0;           // 0: one set of slopes for all sequences
  const float* sinks = nullptr;         // [Hq]; if has_sinks
  const int64_t* q_lengths = nullptr;   // [B] true lengths <= Lq, dense layouts; may be null
  const int64_t* kv_lengths = nullptr;  // [B] true lengths <= Lk, dense layouts; may be null
  const int64_t* q_offsets = nullptr;   // [B + 1] cumulative, packed
  const int64_t* kv_offsets = nullptr;  // [B + 1] cumulative, packed
  PageTable kv_pages;                   // if page_rows > 0
  DropoutPlace dropout;                 // if problem.dropout > 0
};

// Records in the problem the properties of the bias that kernel selection depends on.
inline void SetBias(DType dtype, Problem* p) {
  p->has_bias = true;
  p->bias_bits = dtype == DType::kBit;
  p->bias_as_q = dtype == p->dtype;
}

// Whether the bias is a mask of bits.
ATTEND_HD inline bool HasBits(const Attention& a) {
  return a.problem.has_bias && a.bias.dtype == DType::kBit;
}

// One output row: sequence, query head, query row within the sequence.
struct RowId {
  int64_t b = 0;
  int64_t h = 0;
  int64_t i = 0;

  friend auto operator<=>(const RowId&, const RowId&) = default;
};

// Position of sequence b. Rows are counted from the view's data + b * stride_b. Dense rows from
// q_len up to problem.len_q are padding: O is 0 there, LSE is -inf, and nothing at or beyond q_len
// / k_len is ever read.
struct Sequence {
  int64_t q_row = 0;   // first row of Q, O and LSE
  int64_t k_row = 0;   // first row of K and V
  int64_t q_len = 0;   // true query rows
  int64_t k_len = 0;   // true key rows
  int64_t q_rows = 0;  // rows of O to write: q_len packed, len_q dense
  int64_t offset = 0;  // of the diagonal, see Alignment
};

// The diagonal's offset for a sequence of these lengths, see Alignment. If the keys are a part, it
// is counted in the part's keys.
ATTEND_HD inline int64_t DiagonalOffset(const Problem& p, int64_t q_len, int64_t k_len) {
  if (p.mask.alignment == Alignment::kTopLeft) return -p.key_offset;
  return k_len + p.keys_after - q_len;
}

ATTEND_HD inline Sequence SequenceOf(const Attention& a, int64_t b) {
  Sequence s;
  if (a.problem.packed) {
    s.q_row = a.q_offsets[b];
    s.k_row = a.kv_offsets[b];
    s.q_len = a.q_offsets[b + 1] - s.q_row;
    s.k_len = a.kv_offsets[b + 1] - s.k_row;
    s.q_rows = s.q_len;
  } else {
    s.q_len = a.q_lengths ? a.q_lengths[b] : a.problem.len_q;
    s.k_len = a.kv_lengths ? a.kv_lengths[b] : a.problem.len_k;
    s.q_rows = a.problem.len_q;
  }
  s.offset = DiagonalOffset(a.problem, s.q_len, s.k_len);
  return s;
}

// Element of K's or V's view at which key j of KV head h of sequence b begins.
ATTEND_HD inline int64_t KeyElement(const Attention& a, const ConstTensorView& view,
                                    const Sequence& s, int64_t b, int64_t h, int64_t j) {
  const int64_t rows = a.problem.page_rows;
  if (rows == 0) return b * view.stride_b + h * view.stride_h + (s.k_row + j) * view.stride_l;
  const int64_t page = a.kv_pages.pages[b * a.kv_pages.stride + j / rows];
  return page * view.stride_b + h * view.stride_h + j % rows * view.stride_l;
}

// How many of the keys [j, j + keys) are evenly spaced from j on, stride_l apart: up to the page's
// end.
ATTEND_HD inline int64_t EvenKeys(const Problem& p, int64_t j, int64_t keys) {
  const int64_t rows = p.page_rows;
  return rows == 0 || keys < rows - j % rows ? keys : rows - j % rows;
}

// The keys [begin, end) that query row i of a sequence sees; begin >= end if none. Saturating, so
// that windows near INT64_MAX work.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

ATTEND_HD inline KeyRange VisibleKeys(const Mask& mask, const Sequence& s, int64_t i) {
  const int64_t diagonal = i + s.offset;
  KeyRange range{0, s.k_len};
  if (mask.left >= 0 && mask.left < diagonal) range.begin = diagonal - mask.left;
  if (mask.right >= 0 && mask.right < s.k_len - diagonal) range.end = diagonal + mask.right + 1;
  if (range.end > s.k_len) range.end = s.k_len;
  return range;
}

// Number of (query, key) pairs that the mask leaves, over all sequences, for one head. Host memory
// only (reads the length arrays).
double VisiblePairs(const Attention& attention);
// The same for one sequence.
double VisiblePairs(const Mask& mask, const Sequence& sequence);

// FLOPs of the forward pass: 2 * (D + Dv) per visible pair and query head.
double Flops(const Attention& attention);

// Elements that Q, K, V and O (Q with dim_v) have by the problem's dense or packed shape.
int64_t ElementsQ(const Problem& problem);
int64_t ElementsK(const Problem& problem);
int64_t ElementsV(const Problem& problem);
int64_t ElementsO(const Problem& problem);
int64_t ElementsLse(const Problem& problem);

// Bytes of O, and of LSE (0 unless requested).
int64_t BytesO(const Problem& problem);
int64_t BytesLse(const Problem& problem);

// "float16 B2 Hq8 Hkv2 Lq128 Lk256 D64 Dv64 mask-br[-1,0] lse": for logs and test names.
std::string Describe(const Problem& problem);

}  // namespace attend

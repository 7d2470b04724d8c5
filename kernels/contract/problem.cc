// SPDX-License-Identifier: Apache-2.0
//
// Validation rejects before anything is computed: sizes are bounded by limits.h and products are
// overflow-checked once (CheckSizes), so later code may multiply them freely. Pairs under a mask
// are counted in closed form: each side of the band is a sum of clamped row indices, so no loop
// over rows is needed.

#include "kernels/contract/problem.h"

#include <algorithm>
#include <cmath>

#include "kernels/contract/limits.h"
#include "kernels/util/counted.h"

namespace attend {
namespace {

Status Bounded(std::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + ", must be in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

// Sum over i in [0, n) of clamp(i + a, 0, cap).
double SumClamped(int64_t a, int64_t n, int64_t cap) {
  const int64_t rising_begin = std::clamp<int64_t>(-a, 0, n);
  const int64_t rising_end = std::clamp<int64_t>(cap - a, rising_begin, n);
  const double count = static_cast<double>(rising_end - rising_begin);
  const double first = static_cast<double>(rising_begin + a);
  const double last = static_cast<double>(rising_end - 1 + a);
  const double rising = count > 0 ? count * (first + last) / 2 : 0;
  return rising + static_cast<double>(n - rising_end) * static_cast<double>(cap);
}

Status CheckShape(const Problem& p) {
  ATTEND_RETURN_IF_ERROR(Bounded("batch B", p.batch, 0, kBatchMax));
  ATTEND_RETURN_IF_ERROR(Bounded("query heads Hq", p.heads_q, 1, kHeadsMax));
  ATTEND_RETURN_IF_ERROR(Bounded("key/value heads Hkv", p.heads_kv, 1, kHeadsMax));
  if (p.heads_q % p.heads_kv != 0) {
    return InvalidArgument("query heads Hq is " + std::to_string(p.heads_q) +
                           ", must be a multiple of key/value heads Hkv " +
                           std::to_string(p.heads_kv));
  }
  ATTEND_RETURN_IF_ERROR(Bounded("query length Lq", p.len_q, 0, kLengthMax));
  ATTEND_RETURN_IF_ERROR(Bounded("key length Lk", p.len_k, 0, kLengthMax));
  ATTEND_RETURN_IF_ERROR(Bounded("head dim D", p.dim, 1, kHeadDimMax));
  ATTEND_RETURN_IF_ERROR(Bounded("value head dim Dv", p.dim_v, 1, kHeadDimMax));
  if (p.packed) {
    ATTEND_RETURN_IF_ERROR(Bounded("packed query rows", p.total_q, 0, kTotalTokensMax));
    ATTEND_RETURN_IF_ERROR(Bounded("packed key rows", p.total_k, 0, kTotalTokensMax));
  }
  return Status();
}

Status CheckKeys(const Problem& p) {
  ATTEND_RETURN_IF_ERROR(Bounded("key offset", p.key_offset, 0, kLengthMax));
  ATTEND_RETURN_IF_ERROR(Bounded("keys after the part", p.keys_after, 0, kLengthMax));
  ATTEND_RETURN_IF_ERROR(
      Bounded("keys of the whole", p.key_offset + p.len_k + p.keys_after, 0, kLengthMax));
  if (p.page_rows == 0) return Status();
  if (p.packed) return InvalidArgument("keys are in pages, sequences must not be packed");
  ATTEND_RETURN_IF_ERROR(Bounded("rows of a page", p.page_rows, kPageRowsMin, kPageRowsMax));
  if ((p.page_rows & (p.page_rows - 1)) == 0) return Status();
  return InvalidArgument("rows of a page are " + std::to_string(p.page_rows) +
                         ", must be a power of two");
}

Status CheckSizes(const Problem& p) {
  const int64_t sequences = p.packed ? 1 : p.batch;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  struct Tensor {
    std::string_view what;
    int64_t heads, rows, dim;
  };
  for (const Tensor& t : {Tensor{"bytes of q", p.heads_q, rows_q, p.dim},
                          Tensor{"bytes of k", p.heads_kv, rows_k, p.dim},
                          Tensor{"bytes of v", p.heads_kv, rows_k, p.dim_v},
                          Tensor{"bytes of o", p.heads_q, rows_q, p.dim_v}}) {
    // 4: fp32 is the widest dtype that O may have beside the problem's own.
    const int64_t item_bytes = std::max<int64_t>(4, DTypeBytes(p.dtype));
    const Result<int64_t> bytes =
        CheckedProduct(t.what, sequences, t.heads, t.rows, item_bytes * t.dim);
    if (!bytes.ok()) return bytes.status();
  }
  return Status();
}

}  // namespace

Result<int64_t> CheckedProduct(std::string_view what, int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t product = 1;
  for (const int64_t factor : {a, b, c, d}) {
    if (factor < 0) {
      return InvalidArgument(std::string(what) + ": a dimension is " + std::to_string(factor) +
                             ", must be at least 0");
    }
    if (__builtin_mul_overflow(product, factor, &product)) {
      return InvalidArgument(std::string(what) + ": " + std::to_string(a) + " x " +
                             std::to_string(b) + " x " + std::to_string(c) + " x " +
                             std::to_string(d) + " overflows 64 bits");
    }
  }
  return product;
}

Status Check(const Problem& p) {
  ATTEND_RETURN_IF_ERROR(CheckShape(p));
  ATTEND_RETURN_IF_ERROR(CheckKeys(p));
  ATTEND_RETURN_IF_ERROR(CheckSizes(p));
  if (!std::isfinite(p.scale)) {
    return InvalidArgument("scale is " + NumberText(p.scale) + ", must be finite");
  }
  if (p.softcap != 0.0f && !(p.softcap >= kSoftcapMin && p.softcap <= kSoftcapMax)) {
    return InvalidArgument("softcap is " + NumberText(p.softcap) + ", must be in [" +
                           NumberText(kSoftcapMin) + ", " + NumberText(kSoftcapMax) +
                           "], or 0 for none");
  }
  if (p.dropout < 0 || p.dropout >= kDropoutOne) {
    return InvalidArgument("dropout is " + std::to_string(p.dropout) +
                           " of 65536, must be in [0, " + std::to_string(kDropoutOne - 1) + "]");
  }
  if (p.mask.left < -1 || p.mask.right < -1) {
    return InvalidArgument("mask window is [" + std::to_string(p.mask.left) + ", " +
                           std::to_string(p.mask.right) +
                           "], each side must be at least 0, or -1 for no bound");
  }
  return Status();
}

double VisiblePairs(const Mask& mask, const Sequence& s) {
  if (s.k_len == 0 || s.q_len == 0) return 0;
  // Clamp windows to the sequence, which changes nothing and keeps the sums below from overflowing.
  const int64_t far = s.q_len + s.k_len;
  double ends = static_cast<double>(s.q_len) * static_cast<double>(s.k_len);
  double begins = 0;
  if (mask.right >= 0) {
    ends = SumClamped(s.offset + std::min(mask.right, far) + 1, s.q_len, s.k_len);
  }
  if (mask.left >= 0) begins = SumClamped(s.offset - std::min(mask.left, far), s.q_len, s.k_len);
  return std::max(0.0, ends - begins);
}

double VisiblePairs(const Attention& attention) {
  double pairs = 0;
  for (int64_t b = 0; b < attention.problem.batch; ++b) {
    pairs += VisiblePairs(attention.problem.mask, SequenceOf(attention, b));
  }
  return pairs;
}

double Flops(const Attention& attention) {
  const Problem& p = attention.problem;
  return 2.0 * static_cast<double>((p.dim + p.dim_v) * p.heads_q) * VisiblePairs(attention);
}

int64_t ElementsQ(const Problem& p) {
  return p.heads_q * p.dim * (p.packed ? p.total_q : p.batch * p.len_q);
}
int64_t ElementsK(const Problem& p) {
  return p.heads_kv * p.dim * (p.packed ? p.total_k : p.batch * p.len_k);
}
int64_t ElementsV(const Problem& p) {
  return p.heads_kv * p.dim_v * (p.packed ? p.total_k : p.batch * p.len_k);
}
int64_t ElementsO(const Problem& p) {
  return p.heads_q * p.dim_v * (p.packed ? p.total_q : p.batch * p.len_q);
}
int64_t ElementsLse(const Problem& p) {
  return p.heads_q * (p.packed ? p.total_q : p.batch * p.len_q);
}

int64_t BytesO(const Problem& p) { return ElementsO(p) * DTypeBytes(p.o_dtype()); }

int64_t BytesLse(const Problem& p) {
  return p.return_lse ? ElementsLse(p) * static_cast<int64_t>(sizeof(float)) : 0;
}

std::string Describe(const Problem& p) {
  std::string text(DTypeName(p.dtype));
  const auto add = [&text](const char* name, int64_t value) {
    text += std::string(" ") + name + std::to_string(value);
  };
  add("B", p.batch);
  add("Hq", p.heads_q);
  add("Hkv", p.heads_kv);
  add("Lq", p.len_q);
  add("Lk", p.len_k);
  add("D", p.dim);
  add("Dv", p.dim_v);
  if (p.o_float32) text += " o-float32";
  if (p.packed) text += " packed";
  if (p.page_rows > 0) add("page", p.page_rows);
  if (p.key_offset > 0) add("from", p.key_offset);
  if (p.keys_after > 0) add("after", p.keys_after);
  if (!p.mask.unrestricted()) {
    text += p.mask.alignment == Alignment::kBottomRight ? " mask-br[" : " mask-tl[";
    text += std::to_string(p.mask.left) + "," + std::to_string(p.mask.right) + "]";
  }
  if (p.softcap > 0) text += " softcap";
  if (p.dropout > 0) text += " dropout" + std::to_string(p.dropout);
  if (p.has_bias) text += " bias";
  if (p.has_alibi) text += " alibi";
  if (p.has_sinks) text += " sinks";
  if (p.return_lse) text += " lse";
  return text;
}

}  // namespace attend

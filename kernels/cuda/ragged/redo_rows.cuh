// SPDX-License-Identifier: Apache-2.0
//
// Recomputes rows that the tiles of a Tensor Core kernel could not represent, after their last key:
// by one warp, sixteen rows at a time, from global memory. Slower than the tiles (README.md, "Rows
// computed again"), but the main loop pays nothing for it. Device code; a warp calls each function
// together.
//
// There are two kinds. *Marked* rows have scores that their base cannot hold (exponent_base.cuh).
// *Overflowed* rows have an output that is not finite though their sum of weights is: either V is
// not finite, possibly only in keys that the row does not see, or sums of it left fp32's range,
// which no mean of finite values does. The latter are accumulated with smaller weights.

#pragma once

#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/ptx/dropout_mask.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace attend::cuda {

// State of a row after all of its keys; equal in its four lanes, except `largest`.
struct RowEnd {
  SoftmaxState<float> state;
  float unit = 1.0f;  // factor that makes its output fit state.sum
  float largest = 0;  // largest magnitude in the lane's part of the output; NaN if any is
  bool marked = false;
  bool counts = true;  // it exists and has seen a key: its output is defined
};

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Largest magnitude among the lane's outputs of row `r`. `at(j)`: the four floats of a fragment
// (MultiplyAdd) for columns 8 * j and on. Four accumulators break the dependency chain.
template <int kBlocks, class At>
__device__ __forceinline__ float LargestOfRow(const At& at, int r) {
  float largest[4] = {};
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n) {
    largest[n % 4] = MaxOrNan(largest[n % 4], fabsf(at(n / 2)[2 * r + n % 2]));
  }
  return MaxOrNan(MaxOrNan(largest[0], largest[1]), MaxOrNan(largest[2], largest[3]));
}

// Sixteen rows of one query head, from `first` on, for one warp. Uses local memory and loops that
// are not unrolled, so that this rare code does not raise the kernel's register count. kGeneral:
// bias and ALiBi are possible. kPaged: K and V may be paged. kDropout: weights are dropped.
template <class Element, int kBlocks, bool kGeneral, bool kPaged, bool kDropout>
class RowRedo {
 public:
  // Fragments as MultiplyAdd makes them. Between Run and Arrange, lane c of a row's four has in [4
  // * g + i] columns 32 * g + 8 * c + 2 * i and the next, so that V is read eight columns at a
  // time; otherwise columns 8 * j + 2 * c and the next in [j], the standard layout.
  using Output = float[kBlocks][4];

  __device__ __forceinline__ RowRedo(const Attention& attention, int batch, int head, int first)
      : a(attention), b(batch), h(head), s(SequenceOf(attention, batch)) {
    const int kv_head = h / static_cast<int>(a.problem.group());
    const uint16_t* const q_first = RowAt(a.q, h, s.q_row + first);
    k = FirstKey(a.k, kv_head);
    v = FirstKey(a.v, kv_head);
    aligned = IsAligned(a.q, q_first, a.problem.dim) && IsAligned(a.k, k, a.problem.dim) &&
              IsAligned(a.v, v, a.problem.dim_v);
    if (InPages()) aligned = aligned && a.k.stride_b % 8 == 0 && a.v.stride_b % 8 == 0;
    begin = INT32_MAX;
    common_begin = 0;
    common_end = INT32_MAX;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = first + lane / 4 + 8 * r;
      q[r] = RowAt(a.q, h, s.q_row + row[r]);
      if (row[r] >= s.q_len) continue;
      const KeyRange range = VisibleKeys(a.problem.mask, s, row[r]);
      key_begin[r] = static_cast<int>(range.begin);
      key_end[r] = static_cast<int>(range.end);
      common_begin = max(common_begin, key_begin[r]);
      common_end = min(common_end, key_end[r]);
      if (key_begin[r] >= key_end[r]) continue;
      begin = min(begin, key_begin[r]);
      end = max(end, key_end[r]);
    }
    begin = __reduce_min_sync(kAll, begin);
    end = __reduce_max_sync(kAll, end);
    common_begin = __reduce_max_sync(kAll, common_begin);
    common_end = __reduce_min_sync(kAll, common_end);
  }

  // A weight unit for which no sum of finite values overflows. Sums of fp16 values never do, and
  // fp16 could not represent such weights.
  __device__ __forceinline__ float SmallUnit() const {
    if (std::is_same_v<Element, __half>) return 1.0f;
    const int bits = 33 - __clz(max(end - begin, 1));
    return __int_as_float((127 - bits) << 23);
  }

  // Whether every non-finite output must be NaN, because every row of the warp sees a NaN value.
  // Inf proves nothing: the output may be NaN because of keys that the row does not see.
  __device__ __forceinline__ bool ValuesExplain(const Output& o) const {
    if (kDropout || (kGeneral && a.problem.has_bias)) return false;  // these may hide any key
    uint64_t open = 0;  // bit n: column n of the lane is unexplained
#pragma unroll 1
    for (int n = 0; n < 2 * kBlocks; ++n) {
      const bool found = (row[0] < s.q_len && NonFinite(o[n / 2][n % 2])) ||
                         (row[1] < s.q_len && NonFinite(o[n / 2][n % 2 + 2]));
      open |= static_cast<uint64_t>(found) << n;
    }
    for (int quad = 4; quad < 32; quad *= 2) open |= __shfl_xor_sync(kAll, open, quad);
    open = ByEights(open);
#pragma unroll 1
    for (int key = common_begin; key < common_end && __any_sync(kAll, open != 0);) {
#pragma unroll 1
      for (const int stop = min(key + 64, common_end); key < stop; key += 8) {
        const int mine = key + lane / 4;
        const int columns = mine < common_end ? static_cast<int>(a.problem.dim_v) : 0;
#pragma unroll 1
        for (int g = 0; g < kBlocks / 4; ++g) {
          const uint4 x =
              LoadEight(KeyAt(a.v, v, mine, common_end), 32 * g + lane % 4 * 8, columns);
          open &= ~(static_cast<uint64_t>(NansIn(x)) << 8 * g);
        }
      }
      for (int quad = 4; quad < 32; quad *= 2) open &= __shfl_xor_sync(kAll, open, quad);
    }
    return !__any_sync(kAll, open != 0);
  }

  __device__ __forceinline__ void Run(float unit, Output& o, RowEnd (&ends)[2]) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r) ends[r].state.max = NegativeInfinity();
#pragma unroll 1
    for (int j = 0; j < kBlocks; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
    const float inverse = __int_as_float((254 << 23) - __float_as_int(unit));  // unit is 2^n
#pragma unroll 1
    for (int key = begin; key < end; key += kKeys) {
      float p[2][4];  // scores, then weights; fragments of eight keys
      Score(key, p);
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) rescale[r] = Weigh(unit, r, ends[r].state.max, sum[r], p);
      if constexpr (kDropout) Drop(key, p);
      __syncwarp();  // keeps the compiler from merging the halves, which would take more registers
      Accumulate(key, p, rescale, o);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends[r].state.sum = QuadSum(sum[r]) * inverse;
      ends[r].unit = inverse;
      ends[r].largest = 0.0f;
    }
#pragma unroll 1
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        ends[n / 2].largest = MaxOrNan(ends[n / 2].largest, fabsf(o[j][n]));
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float& largest = ends[n / 2].largest;
      largest = MaxOrNan(largest, __shfl_xor_sync(kAll, largest, 1 + n % 2));
    }
  }

  // Moves each lane's columns to the standard layout.
  __device__ __forceinline__ void Arrange(Output& o) const {
#pragma unroll 1
    for (int n = 0; n < 3 * kBlocks / 4; ++n) {
      const int other = n % 3 + 1;
      float(&block)[4] = o[n / 3 * 4 + (lane % 4 ^ other)];
#pragma unroll
      for (float& x : block) x = __shfl_xor_sync(kAll, x, other);
    }
  }

 protected:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kKeys = 16;  // per step

  __device__ __forceinline__ const uint16_t* RowAt(const ConstTensorView& t, int64_t head,
                                                   int64_t at_row) const {
    return static_cast<const uint16_t*>(t.data) + b * t.stride_b + head * t.stride_h +
           at_row * t.stride_l;
  }

  __device__ __forceinline__ bool InPages() const { return kPaged && a.problem.page_rows > 0; }

  // Key 0 of the sequence, or of page 0.
  __device__ __forceinline__ const uint16_t* FirstKey(const ConstTensorView& t,
                                                      int64_t head) const {
    if (!InPages()) return RowAt(t, head, s.k_row);
    return static_cast<const uint16_t*>(t.data) + head * t.stride_h;
  }

  // An arbitrary valid address if the key does not exist.
  __device__ __forceinline__ const uint16_t* KeyAt(const ConstTensorView& t, const uint16_t* first,
                                                   int key, int keys) const {
    if (!InPages()) return first + key * t.stride_l;
    if (key >= keys) return first;
    const auto rows = static_cast<int>(a.problem.page_rows);  // a power of two
    const int64_t page = a.kv_pages.pages[b * a.kv_pages.stride + (key >> (__ffs(rows) - 1))];
    return first + page * t.stride_b + (key & (rows - 1)) * t.stride_l;
  }

  static __device__ __forceinline__ bool IsAligned(const ConstTensorView& t, const uint16_t* row,
                                                   int64_t columns) {
    return ((reinterpret_cast<uint64_t>(row) | 2 * t.stride_l) & 15) == 0 && columns % 8 == 0;
  }

  // Eight adjacent elements of a row; 0 beyond its columns.
  __device__ __forceinline__ uint4 LoadEight(const uint16_t* data, int column, int columns) const {
    if (column >= columns) return make_uint4(0, 0, 0, 0);
    if (aligned) return *reinterpret_cast<const uint4*>(data + column);
    return LoadPiecewise(reinterpret_cast<const char*>(data + column), columns - column);
  }

  // Bit n: element n of eight is NaN.
  static __device__ __forceinline__ uint32_t NansIn(const uint4& x) {
    constexpr uint32_t kInfinity = std::is_same_v<Element, __half> ? 0x7c00 : 0x7f80;
    const auto bits = [](uint32_t pair) -> uint32_t {
      return ((pair & 0x7fff) > kInfinity ? 1 : 0) | ((pair >> 16 & 0x7fff) > kInfinity ? 2 : 0);
    };
    return bits(x.x) | bits(x.y) << 2 | bits(x.z) << 4 | bits(x.w) << 6;
  }

  // Converts the lane's bits from columns 8 * j + 2 * (lane % 4) and the next to columns 32 * g + 8
  // * (lane % 4) and the seven next. The same for all rows.
  __device__ __forceinline__ uint64_t ByEights(uint64_t pairs) const {
    uint64_t eights = 0;
#pragma unroll 1
    for (int c = 0; c < 4; ++c) {
      const uint64_t theirs = __shfl_sync(kAll, pairs, (lane & 28) + c);
#pragma unroll 1
      for (int g = 0; g < kBlocks / 4; ++g) {
        eights |= (theirs >> (8 * g + lane % 4 * 2) & 3) << (8 * g + 2 * c);
      }
    }
    return eights;
  }

  // An element of V; 0 beyond its columns.
  __device__ __forceinline__ float Value(int key, int column) const {
    if (column >= a.problem.dim_v) return 0.0f;
    return Unpack<Element>(KeyAt(a.v, v, key, end)[column]).x;
  }

  // Scores of the keys from `key` on; -inf for those that a row does not see.
  __device__ __forceinline__ void Score(int key, float (&scores)[2][4]) const {
    const Problem& p = a.problem;
    const int dim = static_cast<int>(p.dim);
#pragma unroll
    for (int n = 0; n < 8; ++n) scores[n / 4][n % 4] = 0.0f;
      // The order of columns in a product does not matter: lanes take eight at a time.
#pragma unroll 1
    for (int d = lane % 4 * 8; d - lane % 4 * 8 < dim; d += 32) {
      uint4 query[2], keys[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int mine = key + 8 * n + lane / 4;
        query[n] = LoadEight(q[n], d, row[n] < s.q_len ? dim : 0);
        keys[n] = LoadEight(KeyAt(a.k, k, mine, end), d, mine < end ? dim : 0);
      }
      const uint32_t low[4] = {query[0].x, query[1].x, query[0].y, query[1].y};
      const uint32_t high[4] = {query[0].z, query[1].z, query[0].w, query[1].w};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        MultiplyAdd<Element>(scores[n], low, keys[n].x, keys[n].y);
        MultiplyAdd<Element>(scores[n], high, keys[n].z, keys[n].w);
      }
    }
    const ScoreCap<float> cap = CapOf(p);
    const float inverse = __fdividef(1.0f, cap.value);
    const float slope = kGeneral && p.has_alibi ? a.alibi_slopes[b * a.alibi_stride_b + h] : 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int r = n % 4 / 2;
      const int mine = key + n / 4 * 8 + lane % 4 * 2 + n % 2;
      float& score = scores[n / 4][n % 4];
      score *= p.scale;
      if (cap.on()) score = cap.value * tanhf(score * inverse);
      bool hidden = mine < key_begin[r] || mine >= key_end[r];
      if (kGeneral && p.has_bias && !hidden) {
        const float bias = LoadGlobalBias(
            a.bias, b * a.bias.stride_b + h * a.bias.stride_h + row[r] * a.bias.stride_q + mine);
        hidden = HasBits(a) && bias < 0.0f;
        score += bias;
      }
      if (kGeneral && p.has_alibi) {
        const auto distance = static_cast<float>(mine - row[r] - static_cast<int>(s.offset));
        score -= slope * fabsf(distance);
      }
      if (hidden) score = NegativeInfinity();
    }
  }

  // Turns row r's scores into weights in `unit`. Returns the factor for its output so far.
  __device__ __forceinline__ float Weigh(float unit, int r, float& max, float& sum,
                                         float (&p)[2][4]) const {
    const float top =
        QuadMax(fmaxf(fmaxf(p[0][2 * r], p[0][2 * r + 1]), fmaxf(p[1][2 * r], p[1][2 * r + 1])));
    const float next = fmaxf(max, top);
    const float reference = ReferenceOf(next);
    const float rescale = max == next ? 1.0f : WeightAgainst(max, reference, kLog2E);
    max = next;
    sum *= rescale;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float& x = p[n / 2][2 * r + n % 2];
      // -0 marks a hidden key, here also one whose score is -inf by arithmetic.
      x = x == NegativeInfinity() ? -0.0f : WeightAgainst(x, reference, kLog2E) * unit;
      sum += x;
    }
    return rescale;
  }

  // Marks dropped weights of the keys from `key` on as hidden.
  __device__ __forceinline__ void Drop(int key, float (&p)[2][4]) const {
    uint32_t kept = 0;
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      const int mine = key + n / 4 * 8 + lane % 4 * 2 + n % 2;
      const bool keeps = KeepsWeight(a, b, h, row[0] + n % 4 / 2 * 8, mine);
      kept |= static_cast<uint32_t>(keeps) << n;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if ((kept >> n & 1) == 0) p[n / 4][n % 4] = -0.0f;
    }
  }

  // O = rescale O + P V over finite elements of V; the others are handled separately.
  __device__ __forceinline__ void Accumulate(int key, const float (&p)[2][4],
                                             const float (&rescale)[2], Output& o) const {
    const int dim = static_cast<int>(a.problem.dim_v);
    uint32_t weights[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      weights[n] = Pack<Element>(p[n / 2][n % 2 * 2], p[n / 2][n % 2 * 2 + 1]);
    }
    bool all_finite = true;
#pragma unroll 1
    for (int g = 0; g < kBlocks / 4; ++g) {
      uint32_t values[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int mine = key + 8 * n + lane / 4;
        const uint4 x =
            LoadEight(KeyAt(a.v, v, mine, end), 32 * g + lane % 4 * 8, mine < end ? dim : 0);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t found = NonFinitePair<Element>(words[i]);
          all_finite = all_finite && found == 0;
          values[n][i] = Transpose(words[i] & ~((found >> 15) * 0xffffu));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&block)[4] = o[4 * g + i];
#pragma unroll
        for (int n = 0; n < 4; ++n) block[n] *= rescale[n / 2];
        MultiplyAdd<Element>(block, weights, values[0][i], values[1][i]);
      }
    }
    if (!__all_sync(kAll, all_finite)) AddNonFinite(key, p, o);
  }

  __device__ __forceinline__ void AddNonFinite(int key, const float (&p)[2][4], Output& o) const {
#pragma unroll 1
    for (int n = 0; n < kKeys && key + n < end; ++n) {
      const int owner = (lane & 28) + n % 8 / 2;
      float weight[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float low = n < 8 ? p[0][2 * r] : p[1][2 * r];
        const float high = n < 8 ? p[0][2 * r + 1] : p[1][2 * r + 1];
        weight[r] = __shfl_sync(kAll, n % 2 == 0 ? low : high, owner);
      }
#pragma unroll 1
      for (int m = 0; m < 2 * kBlocks; ++m) {
        const float value = Value(key + n, m / 8 * 32 + lane % 4 * 8 + m % 8);
        if (!NonFinite(value)) continue;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& sum = o[m / 2][2 * r + m % 2];
          if (!IsHiddenWeight(weight[r])) sum = fmaf(weight[r], value, sum);
        }
      }
    }
  }

  const Attention& a;
  const int b, h;
  const Sequence s;
  const int lane = ThreadIndex() % 32;
  int row[2];
  int key_begin[2] = {0, 0}, key_end[2] = {0, 0};  // keys visible to the lane's rows
  int begin, end = 0;                              // visible to some row of the warp
  int common_begin, common_end;                    // visible to every row that exists
  const uint16_t* q[2];
  const uint16_t* k;  // key 0
  const uint16_t* v;
  bool aligned;  // eight elements can be read at once
};

__device__ __forceinline__ bool Overflowed(const RowEnd& end) {
  return end.counts && NonFinite(end.largest) && !NonFinite(end.state.sum);
}

// Recomputes the warp's rows if one of them needs it. `ends`, `at`: the state after the tiles.
template <class Element, int kBlocks, bool kGeneral, bool kPaged, bool kDropout, class At>
__device__ __forceinline__ void RedoRows(const Attention& a, int b, int h, int first_row,
                                         const At& at, RowEnd (&ends)[2]) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool marked = (ends[0].counts && ends[0].marked) || (ends[1].counts && ends[1].marked);
  const bool overflowed = Overflowed(ends[0]) || Overflowed(ends[1]);
  if (__builtin_expect(!__any_sync(kAll, marked || overflowed), 1)) return;
  using Redo = RowRedo<Element, kBlocks, kGeneral, kPaged, kDropout>;
  const Redo redo(a, b, h, first_row);
  typename Redo::Output o;
#pragma unroll
  for (int n = 0; n < 4 * kBlocks; ++n) o[n / 4][n % 4] = at(n / 4)[n % 4];
  const float small = redo.SmallUnit();
  const bool as_they_are = __any_sync(kAll, marked);
  float unit = as_they_are ? 1.0f : small;
  if (!as_they_are && redo.ValuesExplain(o)) return;
#pragma unroll 1
  for (bool again = true; again; unit = small) {
    redo.Run(unit, o, ends);
    again = unit != small && __any_sync(kAll, Overflowed(ends[0]) || Overflowed(ends[1]));
  }
  redo.Arrange(o);
#pragma unroll
  for (int n = 0; n < 4 * kBlocks; ++n) at(n / 4)[n % 4] = o[n / 4][n % 4];
}

}  // namespace attend::cuda

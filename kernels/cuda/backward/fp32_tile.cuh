// SPDX-License-Identifier: Apache-2.0
//
// Backward pass on CUDA cores: a tile of query rows against a tile of keys in shared memory, and
// their products. Supports every problem; the faster rungs support fewer. Device code; a block
// calls each function together.

#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/cuda/backward/launch_list.cuh"
#include "kernels/cuda/backward/measure.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/dropout_mask.cuh"

namespace attend::cuda {

// kHeadDim: upper bound of D and Dv. Fewer keys than 64 are for GPUs with little shared memory.
template <int kHeadDim, int kQueryRows, int kKeyRows = 64>
struct Fp32Tile {
  static constexpr int kD = kHeadDim;
  static constexpr int kRows = kQueryRows;
  static constexpr int kKeys = kKeyRows;
  static constexpr int kThreads = 256;
  // Rows start four banks apart, so that adjacent rows' 16-byte accesses do not conflict.
  static constexpr int kStride = kD + 4;
  static constexpr int kStrideP = kKeys + 4;
  static constexpr int kRowsEach = kRows / 16;  // rows per thread, 16 apart, as are its keys
  static constexpr int kKeysEach = kKeys / 16;
  // Upper bound of its tiles for one of RedoTiles.
  static constexpr int kParts = 64 / kKeys;
  static_assert(kParts <= kRedoParts && kParts * kRows >= (kD <= 128 ? 64 : 32));

  struct Shared {
    float q[kRows][kStride], d_o[kRows][kStride];
    float k[kKeys][kStride], v[kKeys][kStride];
    float weight[kRows][kStrideP];  // P, with dropout applied
    float d_dot[kRows][kStrideP];   // dT times scale
    float lse[kRows], less[kRows], shift[kRows];
    uint64_t seen[kRows];  // bit n: key n counts for the row
    uint64_t kept[kRows];  // and its weight is not dropped
  };
  // More than a block has below compute capability 9.0, where such kernels are not compiled.
  static constexpr bool kNeedsHopper = sizeof(Shared) > 163 * 1024;
};

// One sequence and head, shared by its tiles.
struct Fp32Head {
  const BackwardPass& pass;
  int64_t b, h;
  Sequence s;

  __device__ __forceinline__ Fp32Head(const BackwardPass& pass, int64_t b, int64_t h)
      : pass(pass), b(b), h(h), s(SequenceOf(pass.attention, b)) {}
  __device__ __forceinline__ int64_t kv_head() const { return h / pass.attention.problem.group(); }
  // The row's LSE as the caller passed it.
  __device__ __forceinline__ float Lse(int64_t i) const {
    const Attention& a = pass.attention;
    return a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i];
  }
};

// Loads rows [first, first + kCount) of one head of a tensor to shared memory; zeros where there
// are none. True if an element is NaN or Inf.
template <class T, int kCount>
__device__ __forceinline__ bool LoadRows(float (&to)[kCount][T::kStride], const ConstTensorView& t,
                                         DType dtype, int64_t b, int64_t head, int64_t first,
                                         int64_t rows, int64_t dim) {
  const int64_t base = b * t.stride_b + head * t.stride_h + first * t.stride_l;
  const bool fast = FourAligned(Advance(t.data, dtype, base), dtype, t.stride_l, dim);
  bool found = false;
  const auto store = [&](int n, const float4& x) {
    found = found || NonFinite(x.x) || NonFinite(x.y) || NonFinite(x.z) || NonFinite(x.w);
    *reinterpret_cast<float4*>(&to[n / (T::kD / 4)][n % (T::kD / 4) * 4]) = x;
  };
  constexpr int kFours = kCount * T::kD / 4;
  if (fast && dtype != DType::kFloat32) {
    // Several in flight, as a walk past a few tiles waits for little else.
    constexpr int kAtOnce = std::min(4, kFours / T::kThreads);
    static_assert(kFours % (kAtOnce * T::kThreads) == 0);
    const auto* const data = static_cast<const uint16_t*>(t.data) + base;
    for (int n = threadIdx.x; n < kFours; n += kAtOnce * T::kThreads) {
      uint2 four[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = (n + i * T::kThreads) / (T::kD / 4);
        const int col = (n + i * T::kThreads) % (T::kD / 4) * 4;
        four[i] = make_uint2(0, 0);
        if (row < rows && col < dim) {
          four[i] = *reinterpret_cast<const uint2*>(data + row * t.stride_l + col);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        store(n + i * T::kThreads,
              make_float4(Widen(dtype, static_cast<uint16_t>(four[i].x)),
                          Widen(dtype, static_cast<uint16_t>(four[i].x >> 16)),
                          Widen(dtype, static_cast<uint16_t>(four[i].y)),
                          Widen(dtype, static_cast<uint16_t>(four[i].y >> 16))));
      }
    }
    return found;
  }
  for (int n = threadIdx.x; n < kFours; n += T::kThreads) {
    const int row = n / (T::kD / 4);
    const int col = n % (T::kD / 4) * 4;
    float x[4] = {};
    if (row < rows && col < dim) {
      const int64_t at = base + row * t.stride_l + col;
      if (fast) {
        const float4 four =
            *reinterpret_cast<const float4*>(static_cast<const float*>(t.data) + at);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (col + i < dim) x[i] = LoadGlobal(t.data, dtype, at + i);
        }
      }
    }
    store(n, make_float4(x[0], x[1], x[2], x[3]));
  }
  return found;
}

// Loads query rows from `first` on, with their dO and terms. Returns as LoadRows.
template <class T>
__device__ __forceinline__ bool LoadQueries(typename T::Shared& shared, const Fp32Head& at,
                                            int64_t first) {
  const Attention& a = at.pass.attention;
  const Problem& p = a.problem;
  const int64_t rows = at.s.q_len - first;
  bool found =
      LoadRows<T, T::kRows>(shared.q, a.q, p.dtype, at.b, at.h, at.s.q_row + first, rows, p.dim);
  found |= LoadRows<T, T::kRows>(shared.d_o, at.pass.gradients.d_o, p.o_dtype(), at.b, at.h,
                                 at.s.q_row + first, rows, p.dim_v);
  for (int i = threadIdx.x; i < T::kRows; i += T::kThreads) {
    const bool exists = i < rows;
    const int64_t term = TermIndex(p, at.s, at.b, at.h, first + i);
    const float lse = exists ? at.Lse(first + i) : 0.0f;
    shared.lse[i] = IsMeasured(p, lse) ? at.pass.lse[term] : lse;
    shared.less[i] = exists ? at.pass.less[term] : 0.0f;
    shared.shift[i] = exists ? at.pass.shift[term] : 0.0f;
  }
  return found;
}

template <class T>
__device__ __forceinline__ bool LoadKeys(typename T::Shared& shared, const Fp32Head& at,
                                         int64_t first) {
  const Attention& a = at.pass.attention;
  const Problem& p = a.problem;
  const int64_t rows = at.s.k_len - first;
  bool found = LoadRows<T, T::kKeys>(shared.k, a.k, p.dtype, at.b, at.kv_head(), at.s.k_row + first,
                                     rows, p.dim);
  found |= LoadRows<T, T::kKeys>(shared.v, a.v, p.dtype, at.b, at.kv_head(), at.s.k_row + first,
                                 rows, p.dim_v);
  return found;
}

// Whether some row of the tile sees some key of it. Both ends of the visible range are monotonic.
template <class T>
__device__ __forceinline__ bool TilesMeet(const Fp32Head& at, int64_t row, int64_t key) {
  if (row >= at.s.q_len || key >= at.s.k_len) return false;
  const Mask& mask = at.pass.attention.problem.mask;
  const int64_t last = min(row + T::kRows, at.s.q_len) - 1;
  return VisibleKeys(mask, at.s, row).begin < key + T::kKeys &&
         VisibleKeys(mask, at.s, last).end > key;
}

// Each thread's dot products of rows of `a` and `b`: sums[r][c] = a[y + 16 r] . b[x + 16 c].
template <class T, int kA, int kB>
__device__ __forceinline__ void Multiply(const float (*a)[T::kStride], const float (*b)[T::kStride],
                                         float (&sums)[kA][kB]) {
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll
  for (int n = 0; n < kA * kB; ++n) sums[n / kB][n % kB] = 0.0f;
#pragma unroll 4
  for (int d = 0; d < T::kD; d += 4) {
    float4 right[kB];
#pragma unroll
    for (int c = 0; c < kB; ++c) right[c] = LoadShared4(&b[x + 16 * c][d]);
#pragma unroll
    for (int r = 0; r < kA; ++r) {
      const float4 left = LoadShared4(&a[y + 16 * r][d]);
#pragma unroll
      for (int c = 0; c < kB; ++c) {
        float& sum = sums[r][c];
        sum = fmaf(left.x, right[c].x, sum);
        sum = fmaf(left.y, right[c].y, sum);
        sum = fmaf(left.z, right[c].z, sum);
        sum = fmaf(left.w, right[c].w, sum);
      }
    }
  }
}

struct Fp32Score {
  float score;  // as the softmax sees it
  float slope;  // its derivative with respect to q.k
};

__device__ __forceinline__ Fp32Score ScoreOf(const Fp32Head& at, int64_t i, int64_t j, float dot) {
  const Attention& a = at.pass.attention;
  const Problem& p = a.problem;
  Fp32Score result{RoundedProduct(dot, p.scale), p.scale};
  if (p.softcap > 0.0f) {
    const float share = tanhf(result.score / p.softcap);
    result.score = p.softcap * share;
    result.slope = p.scale * (1.0f - share * share);
  }
  if (p.has_bias) {
    const float bias = LoadGlobalBias(
        a.bias, at.b * a.bias.stride_b + at.h * a.bias.stride_h + i * a.bias.stride_q + j);
    if (HasBits(a) && bias < 0.0f) return {bias, result.slope};
    result.score += bias;
  }
  if (p.has_alibi) {
    const float distance = static_cast<float>(j - i - at.s.offset);
    result.score -= a.alibi_slopes[at.b * a.alibi_stride_b + at.h] * fabsf(distance);
  }
  return result;
}

// One query row and key; all 0 if the pair does not count.
struct Fp32Pair {
  float score = NegativeInfinity();
  float d_weight = 0;  // dP, with dropout applied
  float weight = 0;    // P, with dropout applied
  float d_score = 0;   // dS
  float slope = 0;     // see Fp32Score
  bool counts = false;
  bool kept = false;  // counts and is not dropped
};

struct Fp32Terms {
  float lse, less, shift;
};

__device__ __forceinline__ Fp32Pair PairOf(const Fp32Head& at, int64_t i, int64_t j, float dot,
                                           float d_weight, const Fp32Terms& terms) {
  const Attention& a = at.pass.attention;
  const Fp32Score score = ScoreOf(at, i, j, dot);
  Fp32Pair pair;
  // A key with this score has no weight, whatever its other values; a row without weights has no
  // LSE.
  pair.counts = score.score != NegativeInfinity() && terms.lse != NegativeInfinity();
  if (!pair.counts) return pair;
  pair.score = score.score;
  pair.kept = a.problem.dropout == 0 || KeepsWeight(a, at.b, at.h, i, j);
  const float weight = expf(RoundedDifference(score.score, terms.shift) - terms.lse);
  const float factor = DropoutScale(a.problem.dropout);
  if (pair.kept) pair.weight = weight * factor;
  pair.d_weight = pair.kept ? d_weight * factor : 0.0f;
  pair.d_score = weight * (pair.d_weight - terms.less);
  pair.slope = score.slope;
  return pair;
}

// Computes the tile's pairs: calls visit(row, key, pair) for each of the thread's.
template <class T, class Visit>
__device__ __forceinline__ void ForPairs(const typename T::Shared& shared, const Fp32Head& at,
                                         int64_t row, int64_t key, const Visit& visit) {
  float dots[T::kRowsEach][T::kKeysEach], d_weights[T::kRowsEach][T::kKeysEach];
  Multiply<T>(shared.q, shared.k, dots);
  Multiply<T>(shared.d_o, shared.v, d_weights);
  const int x = threadIdx.x % 16;
  const int y = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
    const int mine = y + 16 * r;
    const int64_t i = row + mine;
    const Fp32Terms terms{shared.lse[mine], shared.less[mine], shared.shift[mine]};
    KeyRange range{0, 0};
    if (i < at.s.q_len) range = VisibleKeys(at.pass.attention.problem.mask, at.s, i);
#pragma unroll
    for (int c = 0; c < T::kKeysEach; ++c) {
      const int64_t j = key + x + 16 * c;
      Fp32Pair pair;
      if (j >= range.begin && j < range.end) {
        pair = PairOf(at, i, j, dots[r][c], d_weights[r][c], terms);
      }
      visit(mine, x + 16 * c, pair);
    }
  }
}

// Collects the rows' key bits from the threads: sixteen lanes share a row, four keys each, as bits
// x + 16 * c.
template <class T>
__device__ __forceinline__ void StoreBits(const uint32_t (&own)[T::kRowsEach],
                                          uint64_t (&to)[T::kRows]) {
  const int half = threadIdx.x % 32 / 16 * 16;
#pragma unroll
  for (int r = 0; r < T::kRowsEach; ++r) {
    uint64_t bits = 0;
#pragma unroll
    for (int c = 0; c < T::kKeysEach; ++c) {
      const uint32_t lanes = __ballot_sync(0xffffffffu, own[r] >> c & 1);
      bits |= static_cast<uint64_t>(lanes >> half & 0xffff) << (16 * c);
    }
    if (threadIdx.x % 16 == 0) to[threadIdx.x / 16 + 16 * r] = bits;
  }
}

// Stores P, the derivatives with respect to q.k, and which pairs count, to shared memory.
template <class T>
__device__ __forceinline__ void ComputeWeights(typename T::Shared& shared, const Fp32Head& at,
                                               int64_t row, int64_t key) {
  uint32_t seen[T::kRowsEach] = {}, kept[T::kRowsEach] = {};
  ForPairs<T>(shared, at, row, key, [&](int r, int c, const Fp32Pair& pair) {
    shared.weight[r][c] = pair.weight;
    shared.d_dot[r][c] = pair.d_score * pair.slope;
    seen[r / 16] |= pair.counts ? 1u << (c / 16) : 0u;
    kept[r / 16] |= pair.kept ? 1u << (c / 16) : 0u;
  });
  StoreBits<T>(seen, shared.seen);
  StoreBits<T>(kept, shared.kept);
}

}  // namespace attend::cuda

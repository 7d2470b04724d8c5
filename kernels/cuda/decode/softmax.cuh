// SPDX-License-Identifier: Apache-2.0
//
// The decoding kernels between a tile's arrival and a split's end: scores, the online softmax, the
// second product. A warp has sixteen rows and some of each tile's keys, with a softmax of its own
// until the split ends. The row's maximum is subtracted from scores before the exponent's scaling,
// so that no score is too large for its weight. Device code; a warp calls each function together.

#pragma once

#include <cstdint>

#include "kernels/cuda/decode/tile.cuh"
#include "kernels/cuda/decode/wgmma_products.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/tanh.cuh"

namespace attend::cuda::decode {

// Per-thread constants of a segment. A thread's rows are two of the warp's sixteen, eight apart, as
// in MultiplyAdd.
template <class T>
struct Place {
  uint32_t shared;                                    // the block's shared memory
  BlockOffsets<T::kDim> offsets{Second::kRows};       // within a tile of Q or V
  BlockOffsets<T::kDim> offsets_k{Second::kColumns};  // within a tile of K
  int row_warp, key_warp;
  int first_key;     // of the thread, within a tile
  int key_begin[2];  // keys visible to the rows
  int key_end[2];
  uint32_t query[T::kQueryStays ? T::kDimSteps : 1][4];

  __device__ __forceinline__ uint32_t QueryRows() const {
    return shared + row_warp * 16 * T::kRowPitch;
  }
};

template <class T>
struct RowState {
  float output[T::kDim / 8][4];
  float max[2];
  float sum[2];  // over the thread's own keys
};

template <class T>
using Scores = float[T::kKeyBlocks][4];
template <class T>
using Weights = uint32_t[T::kKeyBlocks][2];

template <class T>
__device__ __forceinline__ void Start(RowState<T>& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.max[r] = NegativeInfinity();
    state.sum[r] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < T::kDim / 2; ++j) state.output[j / 4][j % 4] = 0.0f;
}

// ---- setup --------------------------------------------------------------------------------------

// The thread's packed row r, relative to the unit's first.
template <class T>
__device__ __forceinline__ int RowOf(const Place<T>& place, int r) {
  return place.row_warp * 16 + ThreadIndex() % 32 / 4 + 8 * r;
}

template <class T>
__device__ __forceinline__ void SetPlace(const Segment& segment, uint32_t shared, Place<T>& place) {
  const int warp = threadIdx.x / 32;
  place.shared = shared;
  place.row_warp = warp % T::kRowWarps;
  place.key_warp = warp / T::kRowWarps;
  place.first_key = place.key_warp * T::kWarpKeys + threadIdx.x % 4 * 2;
  const Sequence& s = segment.sequence;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = RowOf(place, r);
    const auto i = static_cast<int>(static_cast<uint32_t>(segment.row_begin + row) /
                                    static_cast<uint32_t>(segment.group));
    place.key_begin[r] = place.key_end[r] = 0;
    if (row >= segment.rows || i >= s.q_len) continue;
    const KeyRange range = VisibleKeys(segment.attention->problem.mask, s, i);
    place.key_begin[r] = static_cast<int>(min(range.begin, s.k_len));
    place.key_end[r] = static_cast<int>(max(range.end, int64_t{0}));
  }
}

// Loads Q's fragments, after it has arrived.
template <class T>
__device__ __forceinline__ void KeepQuery(Place<T>& place) {
  if constexpr (T::kQueryStays) {
#pragma unroll
    for (int k = 0; k < T::kDimSteps; ++k) {
      LoadMatrix(place.QueryRows() + place.offsets.At(0, k), place.query[k]);
    }
  }
}

// ---- score --------------------------------------------------------------------------------------

// Addresses of the warp's keys in the tile, and of their values.
template <class T>
__device__ __forceinline__ uint32_t KeysOf(const Place<T>& place, uint32_t stage) {
  return stage + place.key_warp * T::kWarpKeys * T::kRowPitch;
}
template <class T>
__device__ __forceinline__ uint32_t ValuesOf(const Place<T>& place, uint32_t stage) {
  return KeysOf(place, stage) + T::kTileBytes;
}

template <class T, class Element>
__device__ __forceinline__ void ScoreMma(const Place<T>& place, uint32_t keys, Scores<T>& s) {
  // Products of a chain depend on each other: with few keys, use two chains each.
  constexpr int kChains = T::kKeyBlocks == 2 ? 2 : 1;
  Scores<T> more;
#pragma unroll
  for (int k = 0; k < T::kDimSteps; ++k) {
    uint32_t q[4];
    if constexpr (T::kQueryStays) {
#pragma unroll
      for (int e = 0; e < 4; ++e) q[e] = place.query[k][e];
    } else {
      LoadMatrix(place.QueryRows() + place.offsets.At(0, k), q);
    }
    Scores<T>& chain = k % kChains == 0 ? s : more;
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; n += 2) {
      uint32_t b[4];
      LoadMatrix(keys + place.offsets_k.At(n / 2, k), b);
      if (k < kChains) {
        Multiply<Element>(chain[n], q, b[0], b[1]);
        Multiply<Element>(chain[n + 1], q, b[2], b[3]);
      } else {
        MultiplyAdd<Element>(chain[n], q, b[0], b[1]);
        MultiplyAdd<Element>(chain[n + 1], q, b[2], b[3]);
      }
    }
  }
  if constexpr (kChains == 2) {
#pragma unroll
    for (int n = 0; n < 4 * T::kKeyBlocks; ++n) s[n / 4][n % 4] += more[n / 4][n % 4];
  }
}

template <class T, class Element>
__device__ __forceinline__ void Score(const Place<T>& place, uint32_t stage, Scores<T>& s) {
  if constexpr (T::kWgmma) {
    const int warpgroup = place.row_warp / 4;
    ScoreWgmma<T, Element>(place.shared + warpgroup * 64 * T::kRowPitch, KeysOf(place, stage), s);
  } else {
    ScoreMma<T, Element>(place, KeysOf(place, stage), s);
  }
}

template <class T>
__device__ __forceinline__ void SubtractSlopes(const Segment& segment, const Place<T>& place,
                                               int key, Scores<T>& s) {
  const Attention& a = *segment.attention;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = RowOf(place, r);
    const int packed = segment.row_begin + row;
    const int i = packed / segment.group;
    if (row >= segment.rows || i >= segment.sequence.q_len) continue;
    const int head = segment.h * segment.group + packed - i * segment.group;
    const float slope = a.alibi_slopes[segment.b * a.alibi_stride_b + head];
    const auto first = static_cast<int>(key + place.first_key - i - segment.sequence.offset);
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][2 * r + e] -= slope * fabsf(static_cast<float>(first + 8 * n + e));
      }
    }
  }
}

// Sets to -inf the scores of keys that a mask of bits hides.
template <class T>
__device__ __forceinline__ void RemoveKeys(const Segment& segment, const Place<T>& place, int key,
                                           Scores<T>& s) {
  static_assert(2 * T::kKeyBlocks <= 32);
  const int first = key + place.key_warp * T::kWarpKeys;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (place.key_begin[r] >= place.key_end[r]) continue;
    const RowPlace row = PlaceRow(segment, RowOf(place, r));
    const uint8_t* const bits = BitsOf(segment, row.head, row.i) + first / 8;
    const int bytes = min((place.key_end[r] - first + 7) / 8, T::kKeyBlocks);
    uint32_t seen = 0;  // of the thread's keys; collected first, which takes few registers
#pragma unroll 4
    for (int n = 0; n < bytes; ++n) {
      seen |= (__ldg(bits + n) >> (threadIdx.x % 4 * 2) & 3u) << 2 * n;
    }
#pragma unroll
    for (int n = 0; n < 2 * T::kKeyBlocks; ++n) {
      float& score = s[n / 2][2 * r + n % 2];
      if ((seen >> n & 1) == 0) score = NegativeInfinity();
    }
  }
}

// The score terms in the order of problem.h; then -inf for keys that a row does not see.
template <class T>
__device__ __forceinline__ void FinishScores(const Segment& segment, const Place<T>& place, int key,
                                             Scores<T>& s) {
  const float scale = segment.scale;
#pragma unroll
  for (int n = 0; n < 4 * T::kKeyBlocks; ++n) s[n / 4][n % 4] *= scale;
  CapScores(segment.cap, s);
  if (segment.has_alibi) SubtractSlopes<T>(segment, place, key, s);
  if (HasHidden(segment, key, T::kKeys)) RemoveKeys<T>(segment, place, key, s);
  if (key >= segment.full_begin && key + T::kKeys <= segment.full_end) return;
  const int first = key + place.first_key;
#pragma unroll
  for (int n = 0; n < 4 * T::kKeyBlocks; ++n) {
    const int r = n % 4 / 2;
    const int mine = first + n / 4 * 8 + n % 2;
    if (mine < place.key_begin[r] || mine >= place.key_end[r]) s[n / 4][n % 4] = NegativeInfinity();
  }
}

// ---- rescale and accumulate ---------------------------------------------------------------------

// Updates the rows' maxima, which weights are relative to.
template <class T>
__device__ __forceinline__ void FollowMaxima(const Scores<T>& s, RowState<T>& state,
                                             float (&reference)[2]) {
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = state.max[r];
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; ++n) {
      top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    reference[r] = ReferenceOf(top);
    rescale[r] = top == state.max[r] ? 1.0f : WeightAgainst(state.max[r], reference[r], kLog2E);
    state.max[r] = top;
    state.sum[r] *= rescale[r];
  }
  if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
    for (int j = 0; j < T::kDim / 2; ++j) state.output[j / 4][j % 4] *= rescale[j % 4 / 2];
  }
}

// Turns scores into weights, for blocks [begin, end) of eight keys.
template <class T, class Element>
__device__ __forceinline__ void WeighBlocks(float unit, const Scores<T>& s,
                                            const float (&reference)[2], int begin, int end,
                                            RowState<T>& state, Weights<T>& p) {
#pragma unroll
  for (int n = begin; n < end; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float low = WeightAgainst(s[n][2 * r], reference[r], kLog2E);
      const float high = WeightAgainst(s[n][2 * r + 1], reference[r], kLog2E);
      state.sum[r] += low + high;
      p[n][r] = Pack<Element>(low * unit, high * unit);
    }
  }
}

template <class T, class Element>
__device__ __forceinline__ void Weigh(float unit, const Scores<T>& s, RowState<T>& state,
                                      Weights<T>& p) {
  float reference[2];
  FollowMaxima<T>(s, state, reference);
  WeighBlocks<T, Element>(unit, s, reference, 0, T::kKeyBlocks, state, p);
}

template <class T, class Element>
__device__ __forceinline__ void AccumulateMma(const Place<T>& place, uint32_t values,
                                              const Weights<T>& p, RowState<T>& state) {
#pragma unroll
  for (int k = 0; k < T::kKeyBlocks / 2; ++k) {
    const uint32_t a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
    for (int j = 0; j < T::kDimSteps; ++j) {
      uint32_t b[4];
      LoadMatrixTransposed(values + place.offsets.At(k, j), b);
      MultiplyAdd<Element>(state.output[2 * j], a, b[0], b[1]);
      MultiplyAdd<Element>(state.output[2 * j + 1], a, b[2], b[3]);
    }
  }
}

template <class T, class Element>
__device__ __forceinline__ void Accumulate(const Place<T>& place, uint32_t stage,
                                           const Weights<T>& p, RowState<T>& state) {
  if constexpr (T::kWgmma) {
    StartAccumulate<T, Element>(ValuesOf(place, stage), p, 0, T::kKeyBlocks, state.output);
    FinishAccumulate<T>(state.output);
  } else {
    AccumulateMma<T, Element>(place, ValuesOf(place, stage), p, state);
  }
}

// One tile of keys.
template <class T, class Element>
__device__ __forceinline__ void Step(const Segment& segment, const Place<T>& place, uint32_t stage,
                                     int key, RowState<T>& state) {
  Scores<T> s;
  Score<T, Element>(place, stage, s);
  FinishScores<T>(segment, place, key, s);
  Weights<T> p;
  if constexpr (T::kWgmma) {
    // One half's product overlaps with computing the other's weights.
    constexpr int kHalf = T::kKeyBlocks < 8 ? T::kKeyBlocks : T::kKeyBlocks / 2;
    float reference[2];
    FollowMaxima<T>(s, state, reference);
#pragma unroll
    for (int n = 0; n < T::kKeyBlocks; n += kHalf) {
      WeighBlocks<T, Element>(1.0f, s, reference, n, n + kHalf, state, p);
      StartAccumulate<T, Element>(ValuesOf(place, stage), p, n, n + kHalf, state.output);
    }
    FinishAccumulate<T>(state.output);
  } else {
    Weigh<T, Element>(1.0f, s, state, p);
    Accumulate<T, Element>(place, stage, p, state);
  }
}

// ---- values that are not finite -----------------------------------------------------------------

// O += P V for the non-finite elements of V only, of rows that see their key. Slow: uses local
// memory, so that this rare code does not raise the kernel's register count.
template <class T, class Element>
__device__ __forceinline__ void AddNonFinite(const Place<T>& place, const char* values,
                                             const Scores<T>& s, const Weights<T>& p,
                                             RowState<T>& state) {
  float weights[2][T::kWarpKeys / 4];  // of the thread's own keys; -0: hidden
  float output[T::kDim / 2];
#pragma unroll
  for (int n = 0; n < T::kKeyBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 pair = Unpack<Element>(p[n][r]);
      weights[r][2 * n] = s[n][2 * r] == NegativeInfinity() ? -0.0f : pair.x;
      weights[r][2 * n + 1] = s[n][2 * r + 1] == NegativeInfinity() ? -0.0f : pair.y;
    }
  }
#pragma unroll
  for (int j = 0; j < T::kDim / 2; ++j) output[j] = state.output[j / 4][j % 4];
  const int lane = ThreadIndex() % 32;
#pragma unroll 1
  for (int key = 0; key < T::kWarpKeys; ++key) {
    const int row = place.key_warp * T::kWarpKeys + key;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = weights[r][key / 8 * 2 + key % 2];
      const float weight = __shfl_sync(0xffffffffu, own, (lane & 28) + key % 8 / 2);
      if (IsHiddenWeight(weight)) continue;
#pragma unroll 1
      for (int j = 0; j < T::kDim / 8; ++j) {
        const auto pair =
            *reinterpret_cast<const uint32_t*>(values + T::Offset(T::kKeys, row, j) + lane % 4 * 4);
        const float2 v = Unpack<Element>(pair);
        float* const o = output + 4 * j + 2 * r;
        if (NonFinite(v.x)) o[0] = fmaf(weight, v.x, o[0]);
        if (NonFinite(v.y)) o[1] = fmaf(weight, v.y, o[1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < T::kDim / 2; ++j) state.output[j / 4][j % 4] = output[j];
}

// Zeroes NaN and Inf in the tile before the product, as 0 * NaN is NaN. All threads of the block.
template <class T, class Element>
__device__ __forceinline__ void TakeOutNonFinite(char* values) {
  const auto finite = [](uint32_t pair) {
    return pair & ~((NonFinitePair<Element>(pair) >> 15) * 0xffffu);
  };
#pragma unroll 1
  for (int n = threadIdx.x; n < T::kTileBytes / 16; n += T::kThreads) {
    uint4& v = reinterpret_cast<uint4*>(values)[n];
    v = make_uint4(finite(v.x), finite(v.y), finite(v.z), finite(v.w));
  }
}

// Step for a split that needs care; all threads of the block. `shared`: the block's memory,
// `offset` the stage in it.
template <class T, class Element>
__device__ __forceinline__ void CarefulStep(const Segment& segment, const Place<T>& place,
                                            char* shared, int offset, int key, RowState<T>& state) {
  Scores<T> s;
  Score<T, Element>(place, place.shared + offset, s);
  FinishScores<T>(segment, place, key, s);
  Weights<T> p;
  Weigh<T, Element>(kSmallUnit<Element>, s, state, p);
  char* const values = shared + offset + T::kTileBytes;
  AddNonFinite<T, Element>(place, values, s, p, state);
  Sync<T>();
  TakeOutNonFinite<T, Element>(values);
  ShowToProducts<T>();
  Sync<T>();
  Accumulate<T, Element>(place, place.shared + offset, p, state);
}

}  // namespace attend::cuda::decode

// SPDX-License-Identifier: Apache-2.0
//
// cuda_decode_sm80 for up to sixteen packed rows: K and V go from global memory to registers, in
// the Tensor Cores' operand order, and warps are independent until a split ends. The products are
// transposed: keys (then columns of V) fill the instruction's sixteen rows and the few query rows
// its eight columns. Device code; a warp calls each function together.
//
// A warp has sixteen keys at a time. With g = lane / 4 and c = lane % 4 throughout, a lane's scores
// are of keys g and g + 8 by rows 2c and 2c + 1 of each eight; its outputs have the same rows.

#pragma once

#include <cstdint>

#include "kernels/cuda/decode/tile.cuh"
#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/tanh.cuh"

namespace attend::cuda::decode {

// ---- geometry -----------------------------------------------------------------------------------

struct DirectConfig {
  int head_dim;  // upper bound of D and Dv: a multiple of 64
  int rows;      // 8 or 16
  int blocks;    // per multiprocessor
  int warps = 4;
};

template <DirectConfig kConfig>
struct Direct {
  static constexpr bool kDirect = true;
  static constexpr bool kWgmma = false;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kKeyWarps = kConfig.warps;
  static constexpr int kBlocks = kConfig.blocks;
  static constexpr int kThreads = 32 * kKeyWarps, kBlockThreads = kThreads, kPlaces = 0;
  static constexpr int kWarpKeys = 16;
  static constexpr int kKeys = kWarpKeys * kKeyWarps;

  static constexpr int kEights = kRows / 8;      // groups of eight rows
  static constexpr int kLaneRows = 2 * kEights;  // rows per lane
  static constexpr int kSpans = kDim / 64;
  // Longer rows of K and V pass through registers in parts. Columns beyond D are then zeroed
  // instead of read again, which is cheaper there.
  static constexpr int kPart = kDim < 128 ? kDim : 128;
  static constexpr int kParts = kDim / kPart;
  static constexpr bool kExact = kParts > 1;
  static constexpr int kPartSpans = kPart / 64;
  static constexpr int kQueryQuads = kDim / 32 * kEights;  // per lane, of four registers
  static constexpr bool kQueryStays = kQueryQuads <= 4;    // in registers

  // Where outputs take this many registers, the next values are loaded only after a split is
  // closed.
  static constexpr bool kHoldsBack = kDim * kRows > 2048;

  // Scratch in shared memory for joining the warps' outputs at a split's end.
  static constexpr int kLaneFours = kDim / 16 * kEights;
  static constexpr int kJoinBytes = kKeyWarps * kLaneFours * 32 * 16;
  static constexpr int kSharedBytes = kJoinBytes + (kQueryStays ? 0 : kQueryQuads * 32 * 16);

  static_assert(kRows % 8 == 0 && kDim % kPart == 0 && (1 << kShortSplit) % kKeys == 0);
  static_assert(kLaneFours % kKeyWarps == 0);
};

// Per-row data of a segment, beside Q. In shared memory.
template <class T>
struct DirectRows {
  int begin[T::kRows], end[T::kRows];  // keys visible to the row
  int diagonal[T::kRows];              // key at distance 0
  float slope[T::kRows];
  const uint8_t* bits[T::kRows];  // if there is a mask of bits
};

template <class T>
struct DirectState {
  // Span t, column pair j: columns 64 * t + 8 * g + 2 * j of the lane's two rows, then the columns
  // after them.
  float output[T::kDim / 16][T::kEights][4];
  float max[T::kLaneRows];
  float sum[T::kLaneRows];  // over the lane's own keys
};

using Quad = uint32_t[4];
// Eight columns of every 32, of keys g and g + 8.
template <class T>
using DirectKeys = Quad[2][2 * T::kPartSpans];
// Eight columns of every 64, of keys 2c, 2c + 1, 2c + 8 and 2c + 9.
template <class T>
using DirectValues = Quad[4][T::kPartSpans];
template <class T>
using DirectScores = float[T::kEights][4];
template <class T>
using DirectWeights = uint32_t[T::kEights][2];

// The unit's row that is the lane's row r.
__device__ __forceinline__ int DirectRow(int r) {
  return r / 2 * 8 + ThreadIndex() % 4 * 2 + r % 2;
}

// ---- load ---------------------------------------------------------------------------------------

__device__ __forceinline__ void LoadStream(const char* data, Quad& x) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(data));
}

// LoadStream if `exists`; otherwise zeros, without reading.
__device__ __forceinline__ void LoadStreamIf(bool exists, const char* data, Quad& x) {
  asm volatile(
      "{ .reg .pred exists;\n"
      "setp.ne.b32 exists, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@exists ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(data), "r"(static_cast<int>(exists)));
}

// The page of the sixteen keys from `key` on; pages have at least 16.
__device__ __forceinline__ int FindPage(const Segment& segment, int key, int end) {
  if (segment.pages == nullptr) return 0;
  return __ldg(segment.pages + (min(key, end - 1) >> segment.page_shift));
}

// Addresses of sixteen keys. Rows from `end` on read the last row before it instead: they get no
// weight, and no row is read that is not visible.
struct DirectBlock {
  const char* data;
  uint64_t stride;  // bytes
  int last;         // last row that exists
  int limit;        // byte offset of the last eight columns

  __device__ __forceinline__ DirectBlock(const Segment& segment, const KeySource& source,
                                         int columns, int key, int page, int end) {
    const int first = min(key, (end - 1) / 16 * 16);
    const auto in_page = static_cast<uint32_t>(first & segment.page_mask);
    const uint64_t at = uint64_t{in_page} * source.stride +
                        uint64_t{static_cast<uint32_t>(page)} * source.page_stride;
    data = source.data + at * kStrideUnit;
    stride = uint64_t{source.stride} * kStrideUnit;
    last = end - 1 - first;
    limit = 2 * columns - 16;
  }
  __device__ __forceinline__ const char* Row(int row) const {
    return data + static_cast<uint32_t>(min(row, last)) * stride;
  }
  // Loads sixteen bytes from byte `at` of a row on. Columns beyond D are zeros if kExact; else the
  // last eight columns again, which is cheapest.
  template <bool kExact>
  __device__ __forceinline__ void Load(const char* row, int at, Quad& x) const {
    if constexpr (kExact) return LoadStreamIf(at <= limit, row + at, x);
    LoadStream(row + min(at, limit), x);
  }
};

template <class T, bool kExact>
__device__ __forceinline__ void LoadKeys(const Segment& segment, int key, int page, int end,
                                         int part, DirectKeys<T>& k) {
  const DirectBlock block(segment, segment.k, segment.columns_k, key, page, end);
  const int lane = ThreadIndex() % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const char* const row = block.Row(lane / 4 + 8 * r);
#pragma unroll
    for (int n = 0; n < 2 * T::kPartSpans; ++n) {
      block.Load<kExact>(row, 2 * part * T::kPart + 64 * n + lane % 4 * 16, k[r][n]);
    }
  }
}

template <class T, bool kExact>
__device__ __forceinline__ void LoadValues(const Segment& segment, int key, int page, int end,
                                           int part, DirectValues<T>& v) {
  const DirectBlock block(segment, segment.v, segment.columns_v, key, page, end);
  const int lane = ThreadIndex() % 32;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const char* const row = block.Row(lane % 4 * 2 + r / 2 * 8 + r % 2);
#pragma unroll
    for (int n = 0; n < T::kPartSpans; ++n) {
      block.Load<kExact>(row, 2 * part * T::kPart + 128 * n + lane / 4 * 16, v[r][n]);
    }
  }
}

// Q's fragments: row g, the columns that the lane has of keys; 0 where there are none.
template <class T>
struct DirectQuery {
  Quad quads[T::kQueryStays ? T::kQueryQuads : 1];
  const uint4* shared;  // used unless kQueryStays

  __device__ __forceinline__ void Get(int n, Quad& q) const {
    if constexpr (T::kQueryStays) {
#pragma unroll
      for (int e = 0; e < 4; ++e) q[e] = quads[n][e];
    } else {
      const uint4 x = shared[32 * n + ThreadIndex() % 32];
      q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
    }
  }
};

// Quad n: rows of group n % kEights, columns from 32 * (n / kEights) on.
template <class T>
__device__ __forceinline__ uint4 LoadQueryQuad(const Segment& segment, int n) {
  const int lane = ThreadIndex() % 32;
  const int row = n % T::kEights * 8 + lane / 4;
  const int column = n / T::kEights * 32 + lane % 4 * 8;
  const RowPlace place = PlaceRow(segment, row);
  if (row >= segment.rows || !place.exists || column >= segment.columns_k) {
    return make_uint4(0, 0, 0, 0);
  }
  return __ldg(reinterpret_cast<const uint4*>(segment.q + place.head * segment.q_stride_h +
                                              place.i * segment.q_stride_l + 2 * column));
}

// All threads of the block; `shared` may be read after a barrier.
template <class T>
__device__ __forceinline__ void LoadQuery(const Segment& segment, char* shared,
                                          DirectQuery<T>& query) {
  if constexpr (T::kQueryStays) {
#pragma unroll
    for (int n = 0; n < T::kQueryQuads; ++n) {
      const uint4 x = LoadQueryQuad<T>(segment, n);
      query.quads[n][0] = x.x, query.quads[n][1] = x.y;
      query.quads[n][2] = x.z, query.quads[n][3] = x.w;
    }
  } else {
    auto* const to = reinterpret_cast<uint4*>(shared + T::kJoinBytes);
    query.shared = to;
#pragma unroll 1
    for (int n = threadIdx.x / 32; n < T::kQueryQuads; n += T::kKeyWarps) {
      to[32 * n + threadIdx.x % 32] = LoadQueryQuad<T>(segment, n);
    }
  }
}

// All threads of the block; the rows may be read after a barrier.
template <class T>
__device__ __forceinline__ void SetRows(const Segment& segment, DirectRows<T>& rows) {
  const int row = threadIdx.x;
  if (row >= T::kRows) return;
  const Sequence& s = segment.sequence;
  const RowPlace place = PlaceRow(segment, row);
  rows.begin[row] = rows.end[row] = 0;
  rows.slope[row] = 0.0f;
  rows.diagonal[row] = static_cast<int>(place.i + s.offset);
  if (row >= segment.rows || !place.exists) return;
  const Attention& a = *segment.attention;
  const KeyRange range = VisibleKeys(a.problem.mask, s, place.i);
  rows.begin[row] = static_cast<int>(min(range.begin, s.k_len));
  rows.end[row] = static_cast<int>(max(range.end, int64_t{0}));
  if (segment.has_alibi) {
    rows.slope[row] = a.alibi_slopes[segment.b * a.alibi_stride_b + place.head];
  }
  if (segment.has_bits) rows.bits[row] = BitsOf(segment, place.head, place.i);
}

// ---- score --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void Start(DirectState<T>& state) {
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    state.max[r] = NegativeInfinity();
    state.sum[r] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < T::kDim / 16; ++j) {
#pragma unroll
    for (int n = 0; n < 4 * T::kEights; ++n) state.output[j][n / 4][n % 4] = 0.0f;
  }
}

// Adds the products of the columns of `part`. Products of a chain depend on each other, so there
// are two chains, which FinishScores adds.
template <class T, class Element>
__device__ __forceinline__ void Score(const DirectQuery<T>& query, const DirectKeys<T>& k, int part,
                                      DirectScores<T> (&s)[2]) {
#pragma unroll
  for (int i = 0; i < 2 * T::kPartSpans; ++i) {
#pragma unroll
    for (int n = 0; n < T::kEights; ++n) {
      Quad q;
      query.Get((part * 2 * T::kPartSpans + i) * T::kEights + n, q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Quad a = {k[0][i][2 * h], k[1][i][2 * h], k[0][i][2 * h + 1], k[1][i][2 * h + 1]};
        if (part == 0 && i == 0) {
          Multiply<Element>(s[h][n], a, q[2 * h], q[2 * h + 1]);
        } else {
          MultiplyAdd<Element>(s[h][n], a, q[2 * h], q[2 * h + 1]);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void SubtractSlopes(const DirectRows<T>& rows, int key,
                                               DirectScores<T>& s) {
  const int first = key + ThreadIndex() % 32 / 4;
#pragma unroll
  for (int n = 0; n < 4 * T::kEights; ++n) {
    const int row = DirectRow(n / 4 * 2 + n % 2);
    const int distance = first + n % 4 / 2 * 8 - rows.diagonal[row];
    s[n / 4][n % 4] -= rows.slope[row] * fabsf(static_cast<float>(distance));
  }
}

// Sets to -inf the scores of keys that a mask of bits hides. `key` is a multiple of 8.
template <class T>
__device__ __forceinline__ void RemoveKeys(const DirectRows<T>& rows, int key, DirectScores<T>& s) {
  const int g = ThreadIndex() % 32 / 4;
#pragma unroll
  for (int n = 0; n < 4 * T::kEights; ++n) {
    const int row = DirectRow(n / 4 * 2 + n % 2);
    const int first = key + n % 4 / 2 * 8;
    const bool seen = first < rows.end[row] && (__ldg(rows.bits[row] + first / 8) >> g & 1) != 0;
    if (!seen) s[n / 4][n % 4] = NegativeInfinity();
  }
}

// The score terms in the order of problem.h; then -inf for keys that a row does not see.
// `key`: the warp's first.
template <class T>
__device__ __forceinline__ void FinishScores(const Segment& segment, const DirectRows<T>& rows,
                                             int key, const DirectScores<T> (&chains)[2],
                                             DirectScores<T>& s) {
  const float scale = segment.scale;
#pragma unroll
  for (int n = 0; n < 4 * T::kEights; ++n) {
    s[n / 4][n % 4] = (chains[0][n / 4][n % 4] + chains[1][n / 4][n % 4]) * scale;
  }
  CapScores(segment.cap, s);
  if (segment.has_alibi) SubtractSlopes<T>(rows, key, s);
  if (HasHidden(segment, key, T::kWarpKeys)) RemoveKeys<T>(rows, key, s);
  if (key >= segment.full_begin && key + T::kWarpKeys <= segment.full_end) return;
  const int first = key + ThreadIndex() % 32 / 4;
#pragma unroll
  for (int n = 0; n < 4 * T::kEights; ++n) {
    const int row = DirectRow(n / 4 * 2 + n % 2);
    const int mine = first + n % 4 / 2 * 8;
    if (mine < rows.begin[row] || mine >= rows.end[row]) s[n / 4][n % 4] = NegativeInfinity();
  }
}

// ---- rescale and accumulate ---------------------------------------------------------------------

// Raises the rows' maxima, which few blocks of keys do.
template <class T>
__device__ __forceinline__ void RaiseMaxima(const DirectScores<T>& s, DirectState<T>& state) {
  float top[T::kLaneRows];
  bool raises = false;
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    top[r] = fmaxf(s[r / 2][r % 2], s[r / 2][r % 2 + 2]);
    raises |= top[r] > state.max[r];
  }
  if (!__any_sync(0xffffffffu, raises)) return;
#pragma unroll
  for (int r = 0; r < T::kLaneRows; ++r) {
    top[r] = fmaxf(top[r], state.max[r]);
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], step));
    }
    const float rescale =
        top[r] == state.max[r] ? 1.0f : WeightAgainst(state.max[r], ReferenceOf(top[r]), kLog2E);
    state.max[r] = top[r];
    state.sum[r] *= rescale;
#pragma unroll
    for (int j = 0; j < T::kDim / 16; ++j) {
      state.output[j][r / 2][r % 2] *= rescale;
      state.output[j][r / 2][r % 2 + 2] *= rescale;
    }
  }
}

// Turns scores into weights: of the lane's rows, for keys g and g + 8.
template <class T, class Element>
__device__ __forceinline__ void Weigh(float unit, const DirectScores<T>& s, DirectState<T>& state,
                                      DirectWeights<T>& p) {
  RaiseMaxima<T>(s, state);
#pragma unroll
  for (int n = 0; n < T::kEights; ++n) {
    float weights[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& sum = state.sum[2 * n + e % 2];
      weights[e] = WeightAgainst(s[n][e], ReferenceOf(state.max[2 * n + e % 2]), kLog2E);
      sum += weights[e];
    }
    p[n][0] = Pack<Element>(weights[0] * unit, weights[1] * unit);
    p[n][1] = Pack<Element>(weights[2] * unit, weights[3] * unit);
  }
}

// Transposes weights for the second product: row g, keys 2c, 2c + 1, 2c + 8 and 2c + 9.
template <class T>
__device__ __forceinline__ void Turn(DirectWeights<T>& p) {
#pragma unroll
  for (int n = 0; n < 2 * T::kEights; ++n) p[n / 2][n % 2] = Transpose(p[n / 2][n % 2]);
}

template <class T, class Element>
__device__ __forceinline__ void Accumulate(const DirectWeights<T>& p, const DirectValues<T>& v,
                                           int part, DirectState<T>& state) {
#pragma unroll
  for (int t = 0; t < T::kPartSpans; ++t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Quad a = {
          __byte_perm(v[0][t][j], v[1][t][j], 0x5410), __byte_perm(v[0][t][j], v[1][t][j], 0x7632),
          __byte_perm(v[2][t][j], v[3][t][j], 0x5410), __byte_perm(v[2][t][j], v[3][t][j], 0x7632)};
#pragma unroll
      for (int n = 0; n < T::kEights; ++n) {
        MultiplyAdd<Element>(state.output[(part * T::kPartSpans + t) * 4 + j][n], a, p[n][0],
                             p[n][1]);
      }
    }
  }
}

}  // namespace attend::cuda::decode

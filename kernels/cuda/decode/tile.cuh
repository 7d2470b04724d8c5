// SPDX-License-Identifier: Apache-2.0
//
// Geometry of the decoding kernels' tiles, the mapping of packed rows, and data movement. Device
// code; all threads of a block call each function together.

#pragma once

#include <climits>
#include <cstdint>

#include "kernels/contract/limits.h"
#include "kernels/contract/problem.h"
#include "kernels/cuda/decode/decode.h"
#include "kernels/cuda/decode/plan.h"
#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace attend::cuda::decode {

// Compile-time configuration of a tile. Warps divide its rows, sixteen each, and its keys.
struct TileConfig {
  int head_dim;   // upper bound of D and Dv: a multiple of 64
  int row_warps;  // of 16 rows each
  int key_warps;
  int keys = 64;       // per tile of K or V: a multiple of 16 * key_warps
  int stages = 3;      // tiles in shared memory
  int blocks = 1;      // per multiprocessor
  bool wgmma = false;  // use wgmma, four row warps together
  // Of K or V in shared memory, filled by warps of their own (ring.cuh). 0: all warps load
  // `stages`.
  int places = 0;
};

inline constexpr int kProducers = 128;  // threads

template <TileConfig kConfig>
struct Tile {
  static constexpr bool kDirect = false;
  static constexpr bool kWgmma = kConfig.wgmma;
  static constexpr int kDim = kConfig.head_dim;
  static constexpr int kRowWarps = kConfig.row_warps;
  static constexpr int kKeyWarps = kConfig.key_warps;
  static constexpr int kKeys = kConfig.keys;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kBlocks = kConfig.blocks;

  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kPlaces = kConfig.places;
  static constexpr int kThreads = 32 * kRowWarps * kKeyWarps;  // that multiply
  static constexpr int kBlockThreads = kThreads + (kPlaces > 0 ? kProducers : 0);
  static constexpr int kWarpKeys = kKeys / kKeyWarps;
  static constexpr int kKeyBlocks = kWarpKeys / 8;
  static constexpr int kDimSteps = kDim / 16;
  static constexpr bool kQueryStays = kDim <= 128 && !kWgmma;  // in registers
  static constexpr bool kFewRegisters = kWgmma && kRowWarps > 4 && kKeys > 64;

  // A tile stores whole rows, or for wgmma each 64 columns of all rows, as TMA would write a box.
  // Chunks of 16 bytes are swizzled the same way.
  static constexpr int kRowPitch = kWgmma ? 128 : TileRow<kDim>::kBytes;
  static constexpr int SpanPitch(int rows) { return kWgmma ? rows * kRowPitch : 128; }
  static __device__ __forceinline__ int Offset(int rows, int row, int chunk) {
    return row * kRowPitch + chunk / 8 * SpanPitch(rows) + 16 * (chunk % 8 ^ row % 8);
  }
  static constexpr int kAlign = kWgmma ? 1024 : 128;
  static constexpr int kTileBytes = kKeys * 2 * kDim;  // of K or V
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kOffsetStages = kRows * 2 * kDim;
  static constexpr int kRingBytes = kPlaces > 0 ? kPlaces* kTileBytes : kStages* kStageBytes;
  static constexpr int kOffsetRing = kOffsetStages + kRingBytes;  // ring.cuh
  static constexpr int kSharedBytes = kOffsetRing + (kPlaces > 0 ? 256 : 0) + (kWgmma ? kAlign : 0);

  // A pass of copies: eight threads copy 128 bytes of a row, span after span.
  static constexpr int kPassRows = kThreads / 8;
  static constexpr int kPasses = kKeys / kPassRows;
  static constexpr int kPassesAtOnce = kFewRegisters ? 1 : kPasses;
  static constexpr int kSpans = kDim / 64;
  static __device__ __forceinline__ int Loader() { return ThreadIndex(); }

  static_assert(kDim % 64 == 0 && kKeys % (16 * kKeyWarps) == 0 && (1 << kShortSplit) % kKeys == 0);
  static_assert(kKeys % kPassRows == 0 && kStages >= 2);
  // The key warps' outputs, except the first's, are exchanged through the last stage computed.
  static_assert((kKeyWarps - 1) * kRows <= kKeys);
  static_assert(!kWgmma || kRowWarps % 4 == 0);
  static_assert(kPlaces == 0 || (kPlaces >= 4 && kWgmma && kKeyWarps == 1));
};

// A barrier of the threads that multiply: all threads of a block without producers.
template <class T>
__device__ __forceinline__ void Sync() {
  if constexpr (T::kPlaces > 0) {
    SyncNamed(1, T::kThreads);
  } else {
    __syncthreads();
  }
}
// The same; whether it is true for any of them.
template <class T>
__device__ __forceinline__ bool SyncOr(bool mine) {
  if constexpr (T::kPlaces == 0) {
    return __syncthreads_or(mine) != 0;
  } else {
    int any;
    asm volatile(
        "{ .reg .pred mine, any;\n"
        "setp.ne.b32 mine, %1, 0;\n"
        "bar.red.or.pred any, 1, %2, mine;\n"
        "selp.b32 %0, 1, 0, any; }"
        : "=r"(any)
        : "r"(static_cast<int>(mine)), "r"(T::kThreads)
        : "memory");
    return any != 0;
  }
}

// A weight unit for which no sum over a split's values overflows. Sums of fp16 values never do.
template <class Element>
inline constexpr float kSmallUnit = std::is_same_v<Element, __half> ? 1.0f : 0x1p-24f;

// The row of Q, O and LSE that a packed row is.
struct RowPlace {
  int i, head;
  bool exists;  // within the true length
};
__device__ __forceinline__ RowPlace PlaceRow(const Segment& segment, int row) {
  const int packed = segment.row_begin + row;
  RowPlace place;
  place.i = static_cast<int>(static_cast<uint32_t>(packed) / static_cast<uint32_t>(segment.group));
  place.head = segment.h * segment.group + packed - place.i * segment.group;
  place.exists = place.i < segment.sequence.q_len;
  return place;
}

// Keys [begin, end) of a segment's split that some row sees; begin is rounded down to a tile.
struct SplitRange {
  int begin, end;
};
template <class T>
__device__ __forceinline__ SplitRange RangeOf(const Segment& segment, int split) {
  const int shift = segment.split_shift;
  const int64_t end = int64_t{segment.first_split + split + 1} << shift;
  return {max((segment.first_split + split) << shift, segment.key_begin / T::kKeys * T::kKeys),
          static_cast<int>(min(end, int64_t{segment.key_end}))};
}

// ---- masks of bits ------------------------------------------------------------------------------

// The bits of query row i of a head.
__device__ __forceinline__ const uint8_t* BitsOf(const Segment& segment, int head, int i) {
  const BiasView& mask = segment.attention->bias;
  const int64_t first = segment.b * mask.stride_b + head * mask.stride_h + i * mask.stride_q;
  return static_cast<const uint8_t*>(mask.data) + first / 8;
}

// Finds the keys of the segment's splits outside of which bits hide none from the unit's rows:
// those of a draft's tree are its last. Threads that multiply; the segment may be read after a
// barrier.
template <class T>
__device__ __forceinline__ void FindHidden(Segment& segment) {
  // Bytes of a row per pass: 32 bits count those of all rows. All heads of each token are searched,
  // also where the tile begins or ends within a token.
  constexpr int kPiece = 1 << 13;
  static_assert(kPiece * (2 * kHeadsMax + T::kRows) <= INT_MAX);
  const int begin = RangeOf<T>(segment, segment.split).begin / 8;
  const int end = (RangeOf<T>(segment, segment.split_end - 1).end + 7) / 8;
  const int first = segment.row_begin / segment.group;
  const int last = min((segment.row_begin + segment.rows - 1) / segment.group,
                       static_cast<int>(segment.sequence.q_len) - 1);
  if (begin >= end || first > last) return;
  const BiasView& mask = segment.attention->bias;
  const int heads = mask.stride_h == 0 ? 1 : segment.group;
  const int rows = mask.stride_q == 0 ? heads : heads * (last - first + 1);
  uint32_t low = INT_MAX, high = 0;
#pragma unroll 1
  for (int from = begin; from < end; from += kPiece) {
    const int bytes = min(end - from, kPiece);
#pragma unroll 8
    for (int n = threadIdx.x; n < rows * bytes; n += T::kThreads) {
      const int row = n / bytes, byte = from + n - row * bytes;
      const int i = first + row / heads, head = segment.h * segment.group + row % heads;
      if (__ldg(BitsOf(segment, head, i) + byte) == 0xff) continue;
      low = min(low, 8u * byte);
      high = max(high, 8u * byte + 8);
    }
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  if (high == 0 || threadIdx.x % 32 != 0) return;
  atomicMin(&segment.hidden_begin, static_cast<int>(low));
  atomicMax(&segment.hidden_end, static_cast<int>(high));
}
// Whether bits may hide some of the `keys` keys from `key` on.
__device__ __forceinline__ bool HasHidden(const Segment& segment, int key, int keys) {
  return key < segment.hidden_end && key + keys > segment.hidden_begin;
}

// ---- load ---------------------------------------------------------------------------------------

// Pages of the rows that a thread copies of one tile, looked up before the tile is loaded.
template <class T>
using PageNumbers = int32_t[T::kPasses];

template <class T>
__device__ __forceinline__ void FindPages(const Segment& segment, int key, int end,
                                          PageNumbers<T>& pages) {
  if (segment.pages == nullptr) return;
  const int first = key + T::Loader() / 8;
#pragma unroll
  for (int pass = 0; pass < T::kPasses; ++pass) {
    const int row = first + pass * T::kPassRows;
    pages[pass] = row < end ? __ldg(segment.pages + (row >> segment.page_shift)) : 0;
  }
}

// Copies eight threads' part of a tile's rows of one tensor. kWhole: all rows and columns exist.
template <class T, bool kPaged, bool kWhole>
__device__ __forceinline__ void CopyRows(const KeySource& source, int in_page, int columns,
                                         uint32_t shared, int key, int end,
                                         const PageNumbers<T>& pages) {
  const int thread = T::Loader();
  const int chunk = thread % 8;
  const int first = key + thread / 8;
  const char* const base = source.data + kStrideUnit * chunk;
  shared += T::Offset(T::kKeys, thread / 8, chunk);
#pragma unroll T::kPassesAtOnce
  for (int pass = 0; pass < T::kPasses; ++pass) {
    const int row = first + pass * T::kPassRows;
    uint64_t at = uint64_t{static_cast<uint32_t>(kPaged ? row & in_page : row)} * source.stride;
    if (kPaged) at += uint64_t{static_cast<uint32_t>(pages[pass])} * source.page_stride;
    const char* const data = base + at * kStrideUnit;
#pragma unroll
    for (int span = 0; span < T::kSpans; ++span) {
      CopyAsync16(shared + pass * T::kPassRows * T::kRowPitch + T::SpanPitch(T::kKeys) * span,
                  data + 128 * span, kWhole || (row < end && 64 * span + 8 * chunk < columns));
    }
  }
}

// Starts the copies of one tensor's keys from `key` on; zeros from `end` on.
template <class T>
__device__ __forceinline__ void LoadTensor(const Segment& segment, const KeySource& source,
                                           int columns, uint32_t shared, int key, int end,
                                           const PageNumbers<T>& pages) {
  const bool whole = key + T::kKeys <= end && columns == T::kDim;
  const int in_page = (1 << segment.page_shift) - 1;
  if (segment.pages == nullptr && whole) {
    CopyRows<T, false, true>(source, 0, 0, shared, key, end, pages);
  } else if (segment.pages == nullptr) {
    CopyRows<T, false, false>(source, 0, columns, shared, key, end, pages);
  } else if (whole) {
    CopyRows<T, true, true>(source, in_page, 0, shared, key, end, pages);
  } else {
    CopyRows<T, true, false>(source, in_page, columns, shared, key, end, pages);
  }
}

template <class T, bool kPaged>
__device__ __forceinline__ void LoadTile(const Segment& segment, uint32_t stage, int key, int end,
                                         const PageNumbers<T>& pages) {
  const int in_page = kPaged ? (1 << segment.page_shift) - 1 : 0;
  const int columns_k = segment.columns_k, columns_v = segment.columns_v;
  if (key + T::kKeys <= end && columns_k == T::kDim && columns_v == T::kDim) {
    CopyRows<T, kPaged, true>(segment.k, in_page, 0, stage, key, end, pages);
    CopyRows<T, kPaged, true>(segment.v, in_page, 0, stage + T::kTileBytes, key, end, pages);
  } else {
    CopyRows<T, kPaged, false>(segment.k, in_page, columns_k, stage, key, end, pages);
    CopyRows<T, kPaged, false>(segment.v, in_page, columns_v, stage + T::kTileBytes, key, end,
                               pages);
  }
}

// Starts the copies of the tile of K and V that begins at `key`; zeros from `end` on.
template <class T>
__device__ __forceinline__ void LoadTile(const Segment& segment, uint32_t stage, int key, int end,
                                         const PageNumbers<T>& pages) {
  if (segment.pages == nullptr) {
    LoadTile<T, false>(segment, stage, key, end, pages);
  } else {
    LoadTile<T, true>(segment, stage, key, end, pages);
  }
}

// Starts the copies of the unit's rows of Q; zeros for those that do not exist.
template <class T>
__device__ __forceinline__ void LoadQuery(const Segment& segment, uint32_t shared) {
  const int thread = ThreadIndex();
  const int chunk = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < T::kRows; row += T::kPassRows) {
    const int packed = segment.row_begin + row;
    const int i = packed / segment.group;
    const int head = segment.h * segment.group + packed - i * segment.group;
    const char* const data =
        segment.q + head * segment.q_stride_h + i * segment.q_stride_l + 16 * chunk;
    const bool exists = row < segment.rows && i < segment.sequence.q_len;
#pragma unroll
    for (int span = 0; span < T::kSpans; ++span) {
      CopyAsync16(shared + T::Offset(T::kRows, row, chunk + 8 * span), data + 128 * span,
                  exists && 64 * span + 8 * chunk < segment.columns_k);
    }
  }
}

}  // namespace attend::cuda::decode

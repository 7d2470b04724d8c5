// SPDX-License-Identifier: Apache-2.0
//
// A tile of a gradient with elements that are not finite, computed again on CUDA cores without
// hidden pairs. First a block looks for rows with non-finite terms that make all of them NaN, which
// takes one step. Otherwise a cluster's blocks share the walk past all pairs, and add up their sums
// in order. Finite elements are kept. Device code; a block, or a cluster, calls each function
// together.

#pragma once

#include <type_traits>

#include "kernels/cuda/backward/fp32_gradients.cuh"
#include "kernels/cuda/ptx/cluster.cuh"

namespace attend::cuda {

// A tile of a gradient: what it belongs to, and its first row.
enum class TileOf { kKeys, kValues, kQueries };
struct TilePlace {
  TileOf of;
  int b, h, row;

  // Tiles are numbered, first those of dK, then of dV, then of dQ.
  template <class T>
  static __device__ __forceinline__ TilePlace At(const Problem& p, uint32_t number) {
    const auto tiles_k = static_cast<uint32_t>((p.len_k + T::kKeys - 1) / T::kKeys);
    const auto heads_k = static_cast<uint32_t>(p.heads_kv);
    const uint32_t keys = tiles_k * heads_k * static_cast<uint32_t>(p.batch);
    const bool queries = number >= 2 * keys;
    const TileOf of = queries ? TileOf::kQueries : number >= keys ? TileOf::kValues : TileOf::kKeys;
    number -= static_cast<uint32_t>(of) * keys;
    const uint32_t tiles =
        queries ? static_cast<uint32_t>((p.len_q + T::kRows - 1) / T::kRows) : tiles_k;
    const uint32_t heads = queries ? static_cast<uint32_t>(p.heads_q) : heads_k;
    return {of, static_cast<int>(number / tiles / heads), static_cast<int>(number / tiles % heads),
            static_cast<int>(number % tiles) * (queries ? T::kRows : T::kKeys)};
  }
  template <class T>
  static __device__ __forceinline__ uint32_t Count(const BackwardPass& pass) {
    return static_cast<uint32_t>(2 * Blocks<T, Of::kKeys>(pass) + Blocks<T, Of::kQueries>(pass));
  }
};

// Whether a row's terms are not finite: then its gradients are not, nor those of the keys it sees.
__device__ __forceinline__ bool IsSpecialRow(const Fp32Head& at, int64_t i) {
  const int64_t term = TermIndex(at.pass.attention.problem, at.s, at.b, at.h, i);
  return !(at.Lse(i) < INFINITY) || NonFinite(at.pass.less[term]);
}
// Whether one of the tile's rows is.
template <class T>
__device__ __forceinline__ bool IsSpecial(const Fp32Head& at, int64_t row) {
  const int64_t i = row + threadIdx.x;
  return __syncthreads_or(threadIdx.x < T::kRows && i < at.s.q_len && IsSpecialRow(at, i)) != 0;
}
// The head's last such row, or -1.
__device__ __forceinline__ int LastSpecialRow(const Fp32Head& at) {
  __shared__ int last;
  int own = -1;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < at.s.q_len; i += blockDim.x) {
    if (IsSpecialRow(at, i)) own = static_cast<int>(i);
  }
  __syncthreads();
  if (threadIdx.x == 0) last = -1;
  __syncthreads();
  if (own >= 0) atomicMax(&last, own);
  __syncthreads();
  return last;
}

// Whether the nth part of a cluster's work is this block's.
__device__ __forceinline__ bool IsMine(uint32_t n) { return n % ClusterBlocks() == ClusterRank(); }

// A thread's elements of a tile: four adjacent ones of every 64 columns of some rows.
struct TilePart {
  uint16_t* data;         // the first, or null
  int64_t stride;         // of rows
  int64_t rows, columns;  // how many exist from there on
};

// The thread's sums, its elements of the tile that are computed again, one bit each, and those of
// them that are not yet decided.
template <class T, int kFirst>
struct Repaired {
  static constexpr int kSecond = T::kD / 16;
  static constexpr int kCount = kFirst * kSecond;
  using Bits = std::conditional_t<(kCount > 32), uint64_t, uint32_t>;
  static constexpr Bits kRow = (Bits{1} << kSecond) - 1;  // a row of sums
  Bits wanted = 0;
  Bits open = 0;
  float sums[kFirst][kSecond] = {};

  // Wants what is NaN, or not finite.
  __device__ __forceinline__ void Find(const TilePart& part, DType dtype, bool nan) {
    if (part.data == nullptr) return;
    const uint32_t least = (dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00) + (nan ? 1 : 0);
    const bool fast = reinterpret_cast<uint64_t>(part.data) % 8 == 0 && part.stride % 4 == 0 &&
                      part.columns % 4 == 0;
    uint2 four[kCount / 4];
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const int col = n % kSecond / 4 * 64;
      const uint16_t* const from = part.data + n / kSecond * part.stride + col;
      four[n / 4] = make_uint2(0, 0);
      if (n / kSecond >= part.rows || col >= part.columns) continue;
      if (fast) {
        four[n / 4] = *reinterpret_cast<const uint2*>(from);
      } else {
        four[n / 4].x = from[0] | (col + 1 < part.columns ? from[1] << 16 : 0);
        four[n / 4].y =
            (col + 2 < part.columns ? from[2] : 0) | (col + 3 < part.columns ? from[3] << 16 : 0);
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint32_t pair = n % 4 < 2 ? four[n / 4].x : four[n / 4].y;
      if ((pair >> 16 * (n % 2) & 0x7fff) >= least) wanted |= Bits{1} << n;
    }
    open = wanted;
  }
  // Alone, or this block's part of the cluster's sums.
  __device__ __forceinline__ void Store(const TilePart& part, DType dtype, bool alone) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if ((wanted >> n & 1) == 0 || !(alone || IsMine(n / 4))) continue;
      part.data[n / kSecond * part.stride + n % kSecond / 4 * 64 + n % 4] =
          Narrow(dtype, sums[n / kSecond][n % kSecond]);
    }
  }
  __device__ __forceinline__ bool IsRowOpen(int n) const {
    return (open >> (n * kSecond) & kRow) != 0;
  }
  // The bits of elements that no further pair changes: NaN, or if these are finite also Inf.
  __device__ __forceinline__ Bits Decided(bool finite) const {
    Bits bits = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float sum = sums[n / kSecond][n % kSecond];
      if (finite ? NonFinite(sum) : isnan(sum)) bits |= Bits{1} << n;
    }
    return bits;
  }
  __device__ __forceinline__ bool IsOpen() const {
    return __syncthreads_or((open & ~Decided(false)) != 0) != 0;
  }
  // Closes what one of the cluster's blocks has decided; returns whether anything is open.
  // `scratch`: for a word of each thread.
  __device__ __forceinline__ bool Exchange(bool finite, Bits* scratch) {
    static_assert(sizeof(T::Shared::weight) >= T::kThreads * sizeof(Bits));
    __syncthreads();
    scratch[threadIdx.x] = Decided(finite);
    SyncCluster();
    for (uint32_t n = 0; n < ClusterBlocks(); ++n) open &= ~PeerShared(scratch, n)[threadIdx.x];
    SyncCluster();
    return __syncthreads_or(open != 0) != 0;
  }
  // Adds up the cluster's sums in the order of ranks: each block some of every thread's, fours.
  __device__ __forceinline__ void Merge(float4* scratch) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      const float* const x = &sums[n / kSecond][n % kSecond];
      scratch[n / 4 * T::kThreads + threadIdx.x] = make_float4(x[0], x[1], x[2], x[3]);
    }
    SyncCluster();
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
      if (!IsMine(n / 4)) continue;
      float* const x = &sums[n / kSecond][n % kSecond];
      x[0] = x[1] = x[2] = x[3] = 0.0f;
      for (uint32_t rank = 0; rank < ClusterBlocks(); ++rank) {
        const float4 y = PeerShared(scratch, rank)[n / 4 * T::kThreads + threadIdx.x];
        x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
      }
    }
    SyncCluster();
  }
};

// ---- dK or dV -----------------------------------------------------------------------------------

template <class T, bool kKeys>
struct KeyRepair {
  typename T::Shared& shared;
  Fp32Head at;
  const int first_head, key;
  bool careful = false;  // some key holds NaN or Inf
  using Own = Repaired<T, T::kKeysEach>;
  Own own;

  __device__ __forceinline__ KeyRepair(typename T::Shared& shared, const BackwardPass& pass,
                                       const TilePlace& tile)
      : shared(shared),
        at(pass, tile.b, tile.h * pass.attention.problem.group()),
        first_head(static_cast<int>(at.h)),
        key(tile.row) {
    // 16-bit weights do not overflow, so an Inf in dV is genuine.
    own.Find(Part(), pass.attention.problem.dtype, !kKeys);
  }

  __device__ __forceinline__ TilePart Part() const {
    const Problem& p = at.pass.attention.problem;
    const TensorView& to = kKeys ? at.pass.gradients.d_k : at.pass.gradients.d_v;
    if (to.data == nullptr) return {};
    const int first = key + static_cast<int>(threadIdx.x) / 16 * T::kKeysEach;
    const int col = static_cast<int>(threadIdx.x) % 16 * 4;
    return {static_cast<uint16_t*>(to.data) + at.b * to.stride_b +
                first_head / p.group() * to.stride_h + (at.s.k_row + first) * to.stride_l + col,
            to.stride_l, at.s.k_len - first, (kKeys ? p.dim : p.dim_v) - col};
  }

  __device__ __forceinline__ void Load() {
    __syncthreads();
    careful = __syncthreads_or(LoadKeys<T>(shared, at, key)) != 0;
  }
  __device__ __forceinline__ bool SeesAll(int64_t i) const {
    const KeyRange seen = VisibleKeys(at.pass.attention.problem.mask, at.s, i);
    bool hidden = false;
#pragma unroll
    for (int c = 0; c < T::kKeysEach; ++c) {
      const int64_t j = key + threadIdx.x / 16 * T::kKeysEach + c;
      hidden = hidden || (own.IsRowOpen(c) && (j < seen.begin || j >= seen.end));
    }
    return __syncthreads_or(hidden) == 0;
  }

  // Alone: whether the heads' last special rows make all NaN. Shared: a cluster's walk past all
  // rows, special ones first, as they decide most elements; tiles belong to ranks in turns.
  __device__ __forceinline__ bool Walk(bool alone) {
    if (alone && !own.IsOpen()) return true;
    Load();
    bool open = true;
    for (int stage = alone ? 0 : 1; stage < 3; ++stage) {
      uint32_t tile = 0;
      open = true;
      for (at.h = first_head; at.h < first_head + at.pass.attention.problem.group() && open;
           ++at.h) {
        int row = 0, end = static_cast<int>(at.s.q_len);
        if (stage == 0) {
          const int last = LastSpecialRow(at);
          if (last < 0 || !SeesAll(last)) continue;
          row = last / T::kRows * T::kRows;
          end = row + 1;
        }
        for (; row < end && open; row += T::kRows) {
          if (stage > 0 && (!TilesMeet<T>(at, row, key) || !IsMine(tile++) ||
                            IsSpecial<T>(at, row) == (stage == 2))) {
            continue;
          }
          AddRows<T, kKeys, !kKeys>(shared, at, row, key, careful, own.sums, own.sums);
          open = own.IsOpen();
        }
      }
      if (stage == 0) break;
      if (stage == 1 &&
          !own.Exchange(!careful, reinterpret_cast<typename Own::Bits*>(shared.weight))) {
        break;
      }
    }
    at.h = first_head;
    return !open;
  }
};

// ---- dQ -----------------------------------------------------------------------------------------

template <class T>
struct QueryRepair {
  typename T::Shared& shared;
  const Fp32Head at;
  const int row;
  bool careful = false;  // some row holds NaN or Inf
  using Own = Repaired<T, T::kRowsEach>;
  Own own;

  __device__ __forceinline__ QueryRepair(typename T::Shared& shared, const BackwardPass& pass,
                                         const TilePlace& tile)
      : shared(shared), at(pass, tile.b, tile.h), row(tile.row) {
    own.Find(Part(), pass.attention.problem.dtype, false);
  }

  __device__ __forceinline__ TilePart Part() const {
    const TensorView& to = at.pass.gradients.d_q;
    if (to.data == nullptr) return {};
    const int first = row + static_cast<int>(threadIdx.x) / 16 * T::kRowsEach;
    const int col = static_cast<int>(threadIdx.x) % 16 * 4;
    return {static_cast<uint16_t*>(to.data) + at.b * to.stride_b + at.h * to.stride_h +
                (at.s.q_row + first) * to.stride_l + col,
            to.stride_l, at.s.q_len - first, at.pass.attention.problem.dim - col};
  }

  __device__ __forceinline__ void Load() {
    __syncthreads();
    careful = __syncthreads_or(LoadQueries<T>(shared, at, row)) != 0;
  }
  // Alone: whether a key that all rows see makes all NaN, which it cannot if a row's terms are
  // finite. Shared: a cluster's walk past all keys, whose tiles belong to ranks in turns.
  __device__ __forceinline__ bool Walk(bool alone) {
    int key = 0, end = static_cast<int>(at.s.k_len);
    if (alone) {
      if (!own.IsOpen()) return true;
      bool finite = false;
#pragma unroll
      for (int r = 0; r < T::kRowsEach; ++r) {
        const int64_t i = row + threadIdx.x / 16 * T::kRowsEach + r;
        finite = finite || (own.IsRowOpen(r) && !IsSpecialRow(at, i));
      }
      const Mask& mask = at.pass.attention.problem.mask;
      const int64_t last = min(static_cast<int64_t>(row + T::kRows), at.s.q_len) - 1;
      key = static_cast<int>(VisibleKeys(mask, at.s, last).begin);
      if (__syncthreads_or(finite) || key >= VisibleKeys(mask, at.s, row).end) return false;
      key = key / T::kKeys * T::kKeys;
      end = key + 1;
    }
    Load();
    uint32_t tile = 0;
    bool open = true;
    for (; key < end && open; key += T::kKeys) {
      if (!alone && (!TilesMeet<T>(at, row, key) || !IsMine(tile++))) continue;
      AddKeys<T>(shared, at, row, key, careful, own.sums);
      open = own.IsOpen();
    }
    return !open;
  }
};

// ---- a tile -------------------------------------------------------------------------------------

// Computes it, alone if one step is enough; returns whether it did.
template <class Repair>
__device__ __forceinline__ bool Compute(Repair repair, bool alone, float4* scratch) {
  if (!repair.Walk(alone) && alone) return false;
  if (!alone) repair.own.Merge(scratch);
  repair.own.Store(repair.Part(), repair.at.pass.attention.problem.dtype, alone);
  return true;
}

}  // namespace attend::cuda

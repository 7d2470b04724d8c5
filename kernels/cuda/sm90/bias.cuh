// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90 with a 16-bit bias. One warp, the loader, has bias tiles brought to shared memory
// by the copy engine, and the consumers add them to their scores. Device code.
//
// A bfloat16 bias is unpacked in units of kBiasUnit, chosen so small that values below -2^23
// overflow: the padding values -1e9 and the lowest float become -inf, and a row that sees other
// keys is not dragged down by them. A row that sees nothing else is recomputed (redo_rows.cuh), as
// is one whose largest score is beyond 2^22. float16 has no such values.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/exponent_base.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

template <bool kBfloat16>
inline constexpr float kBiasUnit = kBfloat16 ? 0x1p-105f : 1.0f;

// Base of a row all of whose visible keys have scores that only became -inf by overflow. Any other
// score raises it, as it does kNoBase.
inline constexpr float kLowBase = -2.9e38f;

// Unpacks two elements, in units of kBiasUnit.
template <bool kBfloat16>
__device__ __forceinline__ float2 UnpackBias(uint32_t pair) {
  if constexpr (kBfloat16) {
    constexpr uint32_t kInverseUnit = 0x74007400u;  // 2^105
    constexpr uint32_t kMinusZero = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(kInverseUnit), "r"(kMinusZero));
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

// Contents of a bias stage.
enum BiasKind : int32_t {
  kNoBias,    // nothing loaded: the tile would change no score
  kSomeRows,  // one row per query row of the tile
  kOneRow,    // a single row, shared by all query rows
};

// The bias tiles as seen by one consumer thread.
template <class T, bool = T::kBias>
struct BiasTiles {};
template <class T>
struct BiasTiles<T, true> {
  static constexpr int kScores = T::kKeys / 2;  // per thread, laid out as in SoftmaxRows

  uint32_t tile;  // shared address of the current tile
  int32_t kind;

  // Bias and K stages advance together: `turn` is K's stage, or -1 for its last.
  static __device__ __forceinline__ int Place(int group, int turn) {
    return turn % T::kBiasStages * T::kBiasParts + group % T::kBiasParts;
  }
  __device__ __forceinline__ void Take(const char* shared, const Sm90SharedStorage<T>& storage,
                                       int group, int turn) {
    turn = (turn + T::kStages) % T::kStages;
    const int place = Place(group, turn);
    Wait(storage.FullBias(place), turn / T::kBiasStages % 2);
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    tile = storage.Bias(place);
    kind = state.bias.kinds[place];
  }
  __device__ __forceinline__ void Leave(const Sm90SharedStorage<T>& storage, int group, int turn) {
    if (threadIdx.x % 32 != 0) return;
    Arrive(storage.EmptyBias(Place(group, (turn + T::kStages) % T::kStages)));
  }

  // Fragments of keys [8 * j, 8 * j + 16), laid out as scores are: pairs of the thread's two rows
  // in x[0] and x[1], eight keys further in x[2] and x[3].
  __device__ __forceinline__ void Read(int j, uint32_t (&x)[4]) const {
    constexpr int kWarps = T::kBiasRows / 16;  // warps that share the part
    const int lane = threadIdx.x % 32;
    const int row = kind == kOneRow ? 0 : 16 * ((threadIdx.x / 32 - 4) % kWarps) + lane % 16;
    constexpr int kChunks = T::kBiasCols / 8;  // 16-byte chunks per row of a box
    const int swizzle = kChunks == 8 ? row % 8 : row / 2 % 4;
    const uint32_t mine = tile + row * 2 * T::kBiasCols + 16 * (lane / 16 ^ swizzle);
    LoadMatrix((mine ^ 16 * (j % kChunks)) + j / kChunks * T::kBoxBytesBias, x);
  }

  // Adds the tile to the scores, whose factor is `to_log2`.
  template <bool kBfloat16>
  __device__ __forceinline__ void Add(float to_log2, float (&scores)[kScores]) const {
    if (kind == kNoBias) return;
    const float factor = __fdividef(kBiasUnit<kBfloat16> * kLog2E, to_log2);
    if (kind == kOneRow) {
      AddPairs<kBfloat16, 2>(factor, scores);
    } else {
      AddPairs<kBfloat16, 1>(factor, scores);
    }
  }

  // kRows: how many of the thread's rows share the same bias.
  template <bool kBfloat16, int kRows>
  __device__ __forceinline__ void AddPairs(float factor, float (&scores)[kScores]) const {
#pragma unroll
    for (int j = 0; j < T::kKeys / 8; j += 2) {
      uint32_t pairs[4];
      Read(j, pairs);
#pragma unroll
      for (int n = 0; n < 4; n += kRows) {
        const float2 bias = UnpackBias<kBfloat16>(pairs[n]);
#pragma unroll
        for (int r = n; r < n + kRows; ++r) {
          float* const score = scores + 4 * j + 4 * (r / 2) + r % 2 * 2;
          score[0] = fmaf(bias.x, factor, score[0]);
          score[1] = fmaf(bias.y, factor, score[1]);
        }
      }
    }
  }

  // Sets kLowBase in rows that have no base, but a bias other than -inf among the first `keys`.
  __device__ __forceinline__ void MarkLowRows(int keys, float (&base)[2]) const {
    constexpr uint32_t kInfinities = 0xff80ff80u;
    uint32_t found = kind == kNoBias ? 3 : 0;  // bit r: row r
    keys -= threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int j = 0; j < T::kKeys / 8; j += 2) {
      uint32_t pairs[4];
      Read(j, pairs);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int left = keys - 8 * (j + n / 2);  // keys from this pair on
        const uint32_t all = left > 1 ? ~0u : left > 0 ? 0xffffu : 0u;
        if (((pairs[n] ^ kInfinities) & all) != 0) found |= 1 << n % 2;
      }
    }
    found |= __shfl_xor_sync(0xffffffffu, found, 1);
    found |= __shfl_xor_sync(0xffffffffu, found, 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (base[r] == kNoBase && (found >> r & 1) != 0) base[r] = kLowBase;
    }
  }
};

// The loader warp. The bias's tensor map takes O's place: these kernels store O from registers.
template <class T>
struct BiasLoader {
  static constexpr int kChunks = T::kKeys / 8;  // 16-byte chunks per row of a tile

  char* shared;
  const Sm90SharedStorage<T> storage;
  const int lane;
  PackedCursor<T::kBiasStages> stage = {};

  // This lane's elements of a bias row that all query rows share, without the sign bits: 0 if all
  // are 0 or -0.
  __device__ __forceinline__ uint32_t Bits(const char* row, int tile, int k_len) const {
    if (lane >= kChunks) return 0;
    const int key = tile * T::kKeys + 8 * lane;
    const int keys = min(k_len - key, 8);
    if (keys == 8) {
      const uint4 x = *reinterpret_cast<const uint4*>(row + 2 * key);
      return (x.x | x.y | x.z | x.w) & 0x7fff7fffu;
    }
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < keys; ++n) {
      bits |= *reinterpret_cast<const uint16_t*>(row + 2 * (key + n)) & 0x7fffu;
    }
    return bits;
  }

  __device__ __forceinline__ void Load(Sm90State<T>& state, const Sm90Work& at, int part, int tile,
                                       int32_t kind, int head, int batch) const {
    const int n = stage.stage() * T::kBiasParts + part;
    const uint32_t full = storage.FullBias(n);
    Wait(storage.EmptyBias(n), stage.parity() ^ 1);
    state.bias.kinds[n] = kind;
    if (kind == kNoBias) {
      Arrive(full);
      return;
    }
    ArriveExpecting(full, T::kBytesBias);
    const int row = kind == kOneRow ? 0 : at.row_begin + T::kBiasRows * part;
#pragma unroll
    for (int box = 0; box < T::kBytesBias / T::kBoxBytesBias; ++box) {
      LoadBox(&at.maps->o, storage.Bias(n) + box * T::kBoxBytesBias, full,
              tile * T::kKeys + box * T::kBiasCols, row, head, batch, CachePolicy::kEvictNormal);
    }
  }

  __device__ __forceinline__ void RunTile(Sm90State<T>& state, const Sm90Work& at) {
    const BiasView& bias = at.attention->bias;
    const int head = BroadcastIndex(bias.stride_h, at.o_head);
    const int batch = BroadcastIndex(bias.stride_b, at.o_batch);
    const bool one_row = bias.stride_q == 0;
    const char* const row = static_cast<const char*>(bias.data) +
                            2 * (at.o_batch * bias.stride_b + at.o_head * bias.stride_h);
    if (lane == 0 && at.new_maps) AcquireTensorMap(&at.maps->o);
    // Prefetch one tile ahead.
    uint32_t bits = one_row ? Bits(row, at.tile_end - 1, at.window.k_len) : 1;
#pragma unroll 1
    for (int tile = at.tile_end - 1; tile >= at.tile_begin; --tile) {
      int32_t kind = one_row ? kOneRow : kSomeRows;
      if (!__any_sync(0xffffffffu, bits != 0)) kind = kNoBias;
      if (one_row && tile > at.tile_begin) bits = Bits(row, tile - 1, at.window.k_len);
      if (lane == 0) {
#pragma unroll 1
        for (int part = 0; part < T::kBiasParts; ++part) {
          Load(state, at, part, tile, kind, head, batch);
        }
      }
      stage.Step();
    }
  }

  __device__ __forceinline__ void Run() {
    auto& state = *reinterpret_cast<Sm90State<T>*>(shared + T::kOffsetState);
    AwaitEarlierLaunches();
    for (PackedCursor<Sm90State<T>::kSlots> slot;; slot.Step()) {
      Wait(storage.FullWork(slot.stage()), slot.parity());
      const Sm90Work& at = state.work[slot.stage()];
      if (at.end) return;
      if (at.tile_begin < at.tile_end) RunTile(state, at);
      __syncwarp();
      if (lane == 0) Arrive(storage.EmptyWork(slot.stage()));
    }
  }
};

}  // namespace attend::cuda

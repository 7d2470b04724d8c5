// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, masks of bits. One warp, the scanner, reads the mask ahead of the producer,
// which then loads only key tiles in which some row sees a key, and tells the consumers in which
// tiles all rows see all keys. For the others a second warp, the arranger, stores the bits beside K
// in the layout of the consumer threads' scores. Device code.

#pragma once

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

// Loads the 32 bits from `bits` on, of which the row has `bytes` >= 1 bytes; 0 beyond them.
// kAligned: they are one aligned word inside the row. Otherwise reads aligned words: up to three
// bytes before `bits`, which cannot cross the start of an allocation, but none past the row, which
// may end one.
template <bool kAligned>
__device__ __forceinline__ uint32_t LoadBits(const uint8_t* bits, int bytes) {
  if constexpr (kAligned) return *reinterpret_cast<const uint32_t*>(bits);
  const auto address = reinterpret_cast<uint64_t>(bits);
  const int skipped = static_cast<int>(address) & 3;
  if (bytes < (skipped == 0 ? 4 : 8 - skipped)) {
    uint32_t word = 0;
#pragma unroll 1
    for (int n = 0; n < min(bytes, 4); ++n) word |= static_cast<uint32_t>(bits[n]) << 8 * n;
    return word;
  }
  const auto* const words = reinterpret_cast<const uint32_t*>(address - skipped);
  return __funnelshift_r(words[0], skipped != 0 ? words[1] : 0, 8 * skipped);
}

// The mask as seen by one consumer thread, and constants that both sides share.
template <class T, bool = T::kBits>
struct MaskBits {};
template <class T>
struct MaskBits<T, true> {
  static_assert(T::kOverlap != Overlap::kSoftmaxTurns);
  static_assert(T::kKeys == 128, "a word of a row for each lane of its quad");
  static constexpr int kRowBytes = T::kKeys / 8;      // bytes of a row per tile
  static constexpr int kWords = kRowBytes / 4;        // 32-bit words of a row per tile
  static constexpr int kScanTiles = 128 / kRowBytes;  // tiles per scan
  static constexpr int kScores = T::kKeys / 2;        // per thread, laid out as in SoftmaxRows
  static constexpr int kEndEntry = -1;                // the tile of rows has no more key tiles

  // Written beside a tile of K.
  static __device__ __forceinline__ int EntryOf(int tile, bool all_seen) {
    return 2 * tile + (all_seen ? 0 : 1);
  }

  int entry;   // of the current tile
  uint2 seen;  // per row; bit n: key 8 * (n / 2) + n % 2, counted from the thread's first

  __device__ __forceinline__ int tile() const { return entry / 2; }

  // Sets the scores of removed keys to -inf.
  __device__ __forceinline__ void Remove(float (&scores)[kScores]) const {
    if (entry % 2 == 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t bits = r == 0 ? seen.x : seen.y;
#pragma unroll
      for (int n = 0; n < kScores / 2; ++n) {
        float& score = scores[n / 2 * 4 + 2 * r + n % 2];
        if ((bits & 1u << n) == 0) score = NegativeInfinity();
      }
    }
  }
};

// Visits the key tiles in which the scanner found a visible key, from last to first, as the
// producer does. Calls work(tile, whether all rows see all keys).
template <class T, class Work>
__device__ __forceinline__ void ForSeenTiles(const Sm90SharedStorage<T>& storage,
                                             const Sm90State<T>& state, const Sm90Work& at,
                                             PackedCursor<kSm90Scans>& scan, const Work& work) {
  using Bits = MaskBits<T>;
  const int begin = at.tile_begin;
  for (int first, stop = at.tile_end; stop > begin; stop = first) {
    first = ::max(stop - Bits::kScanTiles, begin);
    Wait(storage.FullScan(scan.stage()), scan.parity());
    const ScannedTiles seen = state.bits.scans[scan.stage()];
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(storage.EmptyScan(scan.stage()));
    scan.Step();
    for (uint32_t open = seen.some; open != 0;) {
      const int bit = 31 - __clz(static_cast<int>(open));
      open ^= 1u << bit;
      work(first + bit, (seen.all >> bit & 1) != 0);
    }
  }
}

// The scanner warp: finds which key tiles of a tile of rows have a visible key, and in which all
// keys are visible to all rows. It scans 128 bytes of each row at a time.
template <class T>
struct BitScanner {
  using Bits = MaskBits<T>;
  static constexpr int kWords = Bits::kWords;
  static constexpr int kTiles = Bits::kScanTiles;
  static constexpr int kRowsAtOnce = 32 / kTiles;
  static constexpr int kPlaceWords = kTiles * kWords;  // words per row and scan
  char* shared;
  const Sm90SharedStorage<T> storage;
  const int lane;
  PackedCursor<kSm90Scans> scan = {};

  // Word w of a tile, combined over some rows: bits set in any row, and in all rows.
  struct Words {
    uint32_t some[kWords] = {};
    uint32_t all[kWords] = {~0u, ~0u, ~0u, ~0u};

    __device__ __forceinline__ void Add(int w, uint32_t word) {
      some[w] |= word;
      all[w] &= word;
    }
  };

  // Goes through shared memory: all copies are in flight together, and take no registers.
  __device__ __forceinline__ void ReadAligned(Sm90State<T>& state, const uint8_t* bits,
                                              int64_t stride, int rows, bool mine,
                                              Words& words) const {
    if (!mine) return;
    float* const place =
        reinterpret_cast<float*>(&state.bits.scanned[lane / kTiles][lane % kTiles]);
#pragma unroll 4
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      CopyAsync16(place + row * kPlaceWords, reinterpret_cast<const float*>(bits), true);
      bits += kRowsAtOnce * stride;
    }
    CommitCopies();
    WaitCopyGroups<0>();
#pragma unroll 4
    for (int row = 0; row < rows; row += kRowsAtOnce) {
      const float4 x = *reinterpret_cast<const float4*>(place + row * kPlaceWords);
      words.Add(0, __float_as_uint(x.x));
      words.Add(1, __float_as_uint(x.y));
      words.Add(2, __float_as_uint(x.z));
      words.Add(3, __float_as_uint(x.w));
    }
  }
  __device__ __forceinline__ void ReadBytes(const uint8_t* bits, int64_t stride, int rows,
                                            int bytes, bool mine, Words& words) const {
    if (!mine) return;
#pragma unroll 2
    for (int row = 0; row < rows; row += kRowsAtOnce) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (bytes > 4 * w) words.Add(w, LoadBits<false>(bits + 4 * w, bytes - 4 * w));
      }
      bits += kRowsAtOnce * stride;
    }
  }

  // Scans the key tiles [first, stop); a lane has one of them, in every kRowsAtOnce-th row.
  __device__ __forceinline__ ScannedTiles Scan(Sm90State<T>& state, const Sm90Work& at,
                                               const BitRows& mask, int first, int stop) const {
    const int tile = first + lane % kTiles;
    const int skipped = tile * Bits::kRowBytes;
    const int rows =
        (mask.stride == 0 ? 1 : min(at.q_len - at.row_begin, T::kRows)) - lane / kTiles;
    const bool mine = tile < stop && rows > 0;
    const uint8_t* const bits = mask.data + (at.row_begin + lane / kTiles) * mask.stride + skipped;
    Words words;
    if (mask.IsAligned<16>() && stop * Bits::kRowBytes <= mask.row_bytes) {
      ReadAligned(state, bits, mask.stride, rows, mine, words);
    } else {
      ReadBytes(bits, mask.stride, rows, mask.row_bytes - skipped, mine, words);
    }
    bool some = false;
    bool all = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int keys = min(at.window.k_len - tile * T::kKeys - 32 * w, 32);
      const uint32_t valid = keys <= 0 ? 0 : ~0u >> (32 - keys);
      some = some || (words.some[w] & valid) != 0;
      all = all && (words.all[w] | ~valid) == ~0u;
    }
    const uint32_t lanes_some = __ballot_sync(0xffffffffu, some);
    const uint32_t lanes_not_all = __ballot_sync(0xffffffffu, !all);
    const auto by_tile = [](uint32_t lanes) {
      lanes |= lanes >> 16;
      return (lanes | lanes >> 8) & 0xffu;
    };
    static_assert(kTiles == 8);
    return {by_tile(lanes_some), ~by_tile(lanes_not_all)};
  }

  __device__ __forceinline__ void RunTile(Sm90State<T>& state, const Sm90Work& at,
                                          const BitRows& mask) {
    for (int first, stop = at.tile_end; stop > at.tile_begin; stop = first) {
      first = ::max(stop - Bits::kScanTiles, at.tile_begin);
      const ScannedTiles found = Scan(state, at, mask, first, stop);
      Wait(storage.EmptyScan(scan.stage()), scan.parity() ^ 1);
      if (lane == 0) {
        state.bits.scans[scan.stage()] = found;
        Arrive(storage.FullScan(scan.stage()));
      }
      scan.Step();
    }
  }

  __device__ __forceinline__ void Run() {
    auto& state = *reinterpret_cast<Sm90State<T>*>(shared + T::kOffsetState);
    AwaitEarlierLaunches();
    for (PackedCursor<Sm90State<T>::kSlots> slot;; slot.Step()) {
      Wait(storage.FullWork(slot.stage()), slot.parity());
      const Sm90Work& at = state.work[slot.stage()];
      if (at.end) return;
      RunTile(state, at, state.bits.rows[slot.stage()]);
      __syncwarp();
      if (lane == 0) Arrive(storage.EmptyWork(slot.stage()));
    }
  }
};

// The arranger warp: stores a tile's bits beside K in the consumer threads' layout.
template <class T>
struct BitArranger {
  using Bits = MaskBits<T>;

  char* shared;
  const Sm90SharedStorage<T> storage;
  const int lane;
  PackedCursor<T::kStages> k = {};
  PackedCursor<kSm90Scans> scan = {};

  // Each lane of a quad has a word of the row; afterwards each has the bits of its own keys: bit 8
  // * (n % 4) + 2 * (lane % 4) + i of lane n / 4, which is key 8 * n + 2 * (lane % 4) + i, becomes
  // bit 2 * n + i.
  __device__ __forceinline__ uint32_t Arrange(uint32_t x) const {
    // Within a word: transpose the 4 x 4 matrix of bit pairs.
    uint32_t change = (x ^ x >> 6) & 0x00cc00ccu;
    x ^= change ^ change << 6;
    change = (x ^ x >> 12) & 0x0000f0f0u;
    x ^= change ^ change << 12;
    // Within the quad: transpose bytes.
    x = __byte_perm(x, __shfl_xor_sync(0xffffffffu, x, 1), lane % 2 == 0 ? 0x6240 : 0x3715);
    return __byte_perm(x, __shfl_xor_sync(0xffffffffu, x, 2), lane % 4 < 2 ? 0x5410 : 0x3276);
  }

  // Reads the bits while K's stage may still be in use.
  template <bool kAligned>
  __device__ __forceinline__ void ArrangeTile(Sm90State<T>& state, const Sm90Work& at,
                                              const BitRows& mask, int tile) const {
    const int skipped = tile * Bits::kRowBytes + lane % 4 * 4;
    const int bytes = mask.row_bytes - skipped;
    const uint8_t* const bits = mask.data + (bytes > 0 ? skipped : 0);
    constexpr int kWarpsAtOnce = kAligned ? T::kRows / 16 : 2;
#pragma unroll 1
    for (int warp = 0; warp < T::kRows / 16; warp += kWarpsAtOnce) {
      uint32_t x[2 * kWarpsAtOnce];
#pragma unroll
      for (int n = 0; n < 2 * kWarpsAtOnce; ++n) {
        const int row = min(at.row_begin + 16 * warp + 8 * n + lane / 4, at.q_len - 1);
        x[n] = bytes > 0 ? LoadBits<kAligned>(bits + row * mask.stride, bytes) : 0;
      }
#pragma unroll
      for (uint32_t& word : x) word = Arrange(word);
      if (warp == 0) Wait(storage.EmptyK(k.stage()), k.parity() ^ 1);
#pragma unroll
      for (int n = 0; n < kWarpsAtOnce; ++n) {
        state.bits.seen[k.stage()][warp + n][lane] = make_uint2(x[2 * n], x[2 * n + 1]);
      }
    }
  }

  __device__ __forceinline__ void Run() {
    auto& state = *reinterpret_cast<Sm90State<T>*>(shared + T::kOffsetState);
    AwaitEarlierLaunches();
    for (PackedCursor<Sm90State<T>::kSlots> slot;; slot.Step()) {
      Wait(storage.FullWork(slot.stage()), slot.parity());
      const Sm90Work& at = state.work[slot.stage()];
      if (at.end) return;
      const BitRows& mask = state.bits.rows[slot.stage()];
      const bool aligned = mask.IsAligned<4>();
      ForSeenTiles(storage, state, at, scan, [&](int tile, bool all_seen) {
        if (all_seen) {
          Wait(storage.EmptyK(k.stage()), k.parity() ^ 1);
        } else if (aligned && (tile + 1) * Bits::kRowBytes <= mask.row_bytes) {
          ArrangeTile<true>(state, at, mask, tile);
        } else {
          ArrangeTile<false>(state, at, mask, tile);
        }
        Leave();
      });
      Wait(storage.EmptyK(k.stage()), k.parity() ^ 1);
      if (lane == 0) Arrive(storage.EmptyWork(slot.stage()));
      Leave();  // the end entry
    }
  }

  __device__ __forceinline__ void Leave() {
    __syncwarp();
    if (lane == 0) Arrive(storage.FullK(k.stage()));
    k.Step();
  }
};

}  // namespace attend::cuda

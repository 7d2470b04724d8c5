// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90: everything derived from a tile's sizes (table.cuh): registers, shared memory,
// and the descriptions that the producer's warpgroup passes to the consumers. Device code for
// sm_90a.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx/device_math.cuh"
#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/ragged/tile_queue.cuh"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {

// The next stage of a ring buffer, and its barriers' parity.
template <int kStages>
class StageCursor {
 public:
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  __device__ __forceinline__ void Step() {
    if (++stage_ == kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  int stage_ = 0;
  uint32_t parity_ = 0;
};

// The same in one register, for code short of them.
template <int kStages>
class PackedCursor {
 public:
  __device__ __forceinline__ int stage() const { return packed & 0xffff; }
  __device__ __forceinline__ uint32_t parity() const { return packed >> 16; }
  __device__ __forceinline__ void Step() {
    ++packed;
    if (stage() == kStages) packed = parity() != 0 ? 0 : kParity;
  }

 private:
  static constexpr uint32_t kParity = 0x10000;
  uint32_t packed = 0;
};

// The work that hides a warpgroup's softmax.
enum class Overlap {
  kOutput,        // the output product of the tile before
  kOutputTurns,   // likewise, and warpgroups issue their products in turns
  kSoftmaxTurns,  // other warpgroups' products: warpgroups exponentiate in turns
};

// Compile-time configuration of a tile; Sm90Tile derives the rest.
struct Sm90Config {
  int head_dim;          // upper bound of D: a multiple of 32, for the copy engine's boxes
  int value_dim = 0;     // upper bound of Dv: likewise; 0: head_dim
  int warpgroups = 2;    // consumers, of 64 query rows (wgmma's M) each
  int keys;              // per tile of K or V: a multiple of 16, wgmma's step of P V
  int stages = 2;        // tiles of K in shared memory, and as many of V
  int query_stages = 2;  // tiles of Q; 2: the next one is loaded while this one is in use
  Overlap overlap = Overlap::kOutput;
  bool query_in_registers = false;  // keep Q's fragments; else they are read for each key tile
  int blocks = 1;                   // per multiprocessor, whose registers they share
  bool dropout = false;             // applies dropout
  bool bits = false;                // applies a mask of bits
  int bias_stages = 0;              // tiles of a 16-bit bias in shared memory; 0: no bias
  bool general = false;             // supports ALiBi, and O in float32
};

template <Sm90Config kConfig>
struct Sm90Tile {
  static constexpr int kD = kConfig.head_dim;
  static constexpr int kDv = kConfig.value_dim == 0 ? kD : kConfig.value_dim;
  static constexpr int kConsumers = kConfig.warpgroups;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = kConfig.keys;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kStagesQ = kConfig.query_stages;
  static constexpr Overlap kOverlap = kConfig.overlap;
  static constexpr bool kTurns = kOverlap != Overlap::kOutput;
  static constexpr bool kQueryInRegisters = kConfig.query_in_registers;
  static constexpr bool kDropout = kConfig.dropout;
  static constexpr bool kBits = kConfig.bits;
  static constexpr int kBiasStages = kConfig.bias_stages;
  static constexpr bool kBias = kBiasStages > 0;
  static constexpr bool kGeneral = kConfig.general;
  // Whether consumers are a few registers short.
  static constexpr bool kScarce = kBias && kConsumers > 2;
  template <int kCount>
  using Cursor = std::conditional_t<kScarce, PackedCursor<kCount>, StageCursor<kCount>>;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocks = kConfig.blocks;

  // Whether O is stored through its Q's stage: the next Q then needs another one.
  static constexpr bool kStoreThroughQ = kStagesQ > 1 && kDv <= kD && !kBias;

  // setmaxnreg moves registers to the accumulators. It can only redistribute the launch's
  // allotment: equal for all threads, a multiple of 8.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : kBits ? 64 : kScarce ? 56 : 40;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
  static_assert(kConsumerRegisters <= 256);
  // D256 has no registers for the paged producer.
  static constexpr bool kReadsPages = kD <= kSm90PagesDimMax && !kDropout && !kBits && !kBias;
  // D256 has no register for a value that is read only once per key tile.
  static constexpr bool kCapInRegister = kD < 256;

  // Boxes of the copy engine: full 128-byte rows where the head dim allows.
  static constexpr int kCols = kD % 64 == 0 ? 64 : 32;
  static constexpr int kColsV = kDv % 64 == 0 ? 64 : 32;
  static constexpr int kBoxesQK = kD / kCols;
  static constexpr int kBoxesV = kDv / kColsV;
  static constexpr int kBoxBytesQ = kRows * kCols * 2;
  static constexpr int kBoxBytesK = kKeys * kCols * 2;
  static constexpr int kBoxBytesV = kKeys * kColsV * 2;
  static constexpr int kBytesQ = kBoxesQK * kBoxBytesQ;
  static constexpr int kBytesK = kBoxesQK * kBoxBytesK;
  static constexpr int kBytesV = kBoxesV * kBoxBytesV;
  static constexpr int kOffsetK = kStagesQ * kBytesQ;
  static constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
  static constexpr int kOffsetBias = kOffsetV + kStages * kBytesV;
  static constexpr int kBiasCols = kKeys % 64 == 0 ? 64 : 32;  // keys per box
  static constexpr int kBiasParts = kBiasStages == 1 ? kConsumers : 1;
  static constexpr int kBiasRows = kRows / kBiasParts;
  static constexpr int kBoxBytesBias = kBiasRows * kBiasCols * 2;
  static constexpr int kBytesBias = kBiasRows * kKeys * 2;  // of a part
  static constexpr int kOffsetState = kOffsetBias + kBiasStages * kBiasParts * kBytesBias;

  static_assert(!kBias || kStages % (2 * (kBias ? kBiasStages : 1)) == 0,
                "K's place tells the bias's");
  static_assert(kD % 32 == 0 && kDv % 32 == 0 && kKeys % 16 == 0);
  static_assert(!kStoreThroughQ || kCols == kColsV, "O lies as Q did");
  // If Q is in registers, its stage is not freed before O has been stored through it, or (with a
  // bias) before the last scores are complete.
  static_assert(!kQueryInRegisters || kStoreThroughQ || kBias);
};

// The keys that a row sees, in 32 bits: lengths are at most 2^30 (limits.h). As VisibleKeys.
struct Window {
  int32_t left, right;  // -1: unbounded
  int32_t k_len;
  int32_t offset;  // of the diagonal

  __device__ __forceinline__ int Begin(int row) const {
    const int diagonal = row + offset;
    return left >= 0 && left < diagonal ? diagonal - left : 0;
  }
  __device__ __forceinline__ int End(int row) const {
    const int diagonal = row + offset;
    return right >= 0 && right < k_len - diagonal ? diagonal + right + 1 : k_len;
  }
};

// Warps that process a mask of bits (mask_bits.cuh), and the length of the queue of scan results.
inline constexpr int kSm90BitsWarps = 2;
inline constexpr int kSm90Scans = 4;

// The mask's bits of one head.
struct BitRows {
  const uint8_t* data;  // row 0
  int64_t stride;       // bytes between rows; 0: all rows share one
  int32_t row_bytes;

  // Whether all rows begin at multiples of kBytes.
  template <int kBytes>
  __device__ __forceinline__ bool IsAligned() const {
    return (reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride)) % kBytes == 0;
  }
};

// Result of a scan: one bit per key tile.
struct ScannedTiles {
  uint32_t some;  // some row sees some key
  uint32_t all;   // every row sees every key
};

// Description of a tile of query rows, written by the scheduler before its data arrives.
struct Sm90Work {
  // For the consumers.
  bool end;      // no more tiles
  bool vectors;  // rows of O can be written 16 bytes at a time
  bool has_sink;
  int32_t row_begin;
  int32_t q_len, q_rows;
  int32_t tile_begin, tile_end;  // key tiles that some row sees
  int32_t dim_v;
  float to_log2;     // weight = 2^(score * to_log2 - base)
  float cap_factor;  // CapFactor
  float sink;
  Window window;
  uint16_t* o;  // the head's first row
  int64_t o_stride;
  float* lse;               // likewise; null: not wanted
  int32_t o_head, o_batch;  // tensor coordinates
  const Attention* attention;
  // For the producer.
  const TensorMaps* maps;
  bool new_maps;  // not the block's last tile's, and in memory that launches rewrite
  int32_t q_row, q_head, q_batch;  // tensor coordinates
  int32_t k_row, k_head, k_batch;
  int32_t v_head, v_batch;
  bool patch;          // the last tile has rows beyond the length, but within the tensor
  int32_t page_shift;  // log2 of a page's keys
};

// With a mask of bits (mask_bits.cuh): what scheduler, scanner, producer, arranger and consumers
// share.
template <class T, bool = T::kBits>
struct Sm90BitsState {};
template <class T>
struct Sm90BitsState<T, true> {
  BitRows rows[2];  // per description
  ScannedTiles scans[kSm90Scans];
  int32_t entries[T::kStages];  // per stage of K, see MaskBits::EntryOf
  uint2 seen[T::kStages][T::kRows / 16]
            [32];              // likewise, see MaskBits::seen; of the consumers' warps
  uint4 scanned[T::kRows][8];  // scratch of the scanner
  Barrier full_scan[kSm90Scans], empty_scan[kSm90Scans];
};

// With a bias (bias.cuh): what its loader and consumers share, per place: stage * kBiasParts +
// part.
template <class T, bool = T::kBias>
struct Sm90BiasState {};
template <class T>
struct Sm90BiasState<T, true> {
  static constexpr int kPlaces = T::kBiasStages * T::kBiasParts;
  int32_t kinds[kPlaces];  // BiasKind
  Barrier full[kPlaces], empty[kPlaces];
};

// Follows the tiles in shared memory.
template <class T>
struct Sm90State {
  static constexpr int kSlots = 2;  // one tile is described while another is computed
  Sm90Work work[kSlots];
  Barrier full_work[kSlots], empty_work[kSlots];
  Barrier full_q[T::kStagesQ], empty_q[T::kStagesQ];
  Barrier tail;  // for a V tile whose rows the producer clears
  Barrier full_k[T::kStages], empty_k[T::kStages];
  Barrier full_v[T::kStages], empty_v[T::kStages];
  Sm90BitsState<T> bits;
  Sm90BiasState<T> bias;
};

// Addresses of a block's tiles and barriers in shared memory, relative to the first tile.
template <class T>
struct Sm90SharedStorage {
  using State = Sm90State<T>;
  uint32_t base;

  __device__ __forceinline__ uint32_t In(uint32_t member) const {
    return base + T::kOffsetState + member;
  }
  __device__ __forceinline__ uint32_t FullWork(int n) const {
    return In(offsetof(State, full_work)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyWork(int n) const {
    return In(offsetof(State, empty_work)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullQ(int n) const {
    return In(offsetof(State, full_q)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyQ(int n) const {
    return In(offsetof(State, empty_q)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t Tail() const { return In(offsetof(State, tail)); }
  __device__ __forceinline__ uint32_t FullK(int n) const {
    return In(offsetof(State, full_k)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyK(int n) const {
    return In(offsetof(State, empty_k)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullV(int n) const {
    return In(offsetof(State, full_v)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyV(int n) const {
    return In(offsetof(State, empty_v)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullScan(int n) const {
    return In(offsetof(State, bits) + offsetof(Sm90BitsState<T>, full_scan)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyScan(int n) const {
    return In(offsetof(State, bits) + offsetof(Sm90BitsState<T>, empty_scan)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t FullBias(int n) const {
    return In(offsetof(State, bias) + offsetof(Sm90BiasState<T>, full)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t EmptyBias(int n) const {
    return In(offsetof(State, bias) + offsetof(Sm90BiasState<T>, empty)) + 8 * n;
  }
  __device__ __forceinline__ uint32_t Bias(int n) const {
    return base + T::kOffsetBias + n * T::kBytesBias;
  }
  __device__ __forceinline__ uint32_t Q(int stage) const { return base + stage * T::kBytesQ; }
  __device__ __forceinline__ uint32_t K(int stage) const {
    return base + T::kOffsetK + stage * T::kBytesK;
  }
  __device__ __forceinline__ uint32_t V(int stage) const {
    return base + T::kOffsetV + stage * T::kBytesV;
  }
};

template <class T>
inline constexpr int kSm90SharedBytes = 1024 + T::kOffsetState +
                                        static_cast<int>(sizeof(Sm90State<T>));
inline constexpr int kSm90SharedBytesMax = 227 * 1024;  // per block

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90: what follows from a tile's sizes (which are in table.cuh): registers, shared
// memory, and what the producer tells the consumers of a tile. Device code for sm_90a.

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

// The stage that is used next, and the parity of its barriers.
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

// The same in one register, where there are few.
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

// What a warpgroup's softmax runs under.
enum class Overlap {
  kOutput,        // under the output of the tile before
  kOutputTurns,   // likewise, and warpgroups issue their products one after another
  kSoftmaxTurns,  // under other warpgroups' products: exponentials one warpgroup after another
};

// What a tile is compiled for. Sm90Tile works out the rest.
struct Sm90Config {
  int head_dim;          // most that D may be: a multiple of 32, for the copy engine's boxes
  int value_dim = 0;     // most that Dv may be: likewise; 0: head_dim
  int warpgroups = 2;    // consumers, of 64 query rows each: wgmma's
  int keys;              // in a tile of K or V: a multiple of 16, wgmma's steps of P V
  int stages = 2;        // tiles of K in shared memory, and as many of V
  int query_stages = 2;  // tiles of Q; 2: the next one arrives from this one's beginning on
  Overlap overlap = Overlap::kOutput;
  bool query_in_registers = false;  // its fragments; else they are read for each tile of keys
  int blocks = 1;                   // to a multiprocessor, whose registers they share
  bool dropout = false;             // weights are dropped
  bool bits = false;                // a mask of bits removes keys
  int bias_stages = 0;              // tiles of a bias of 16 bits in shared memory; 0: there is none
  bool general = false;             // there may be ALiBi, and O in float32
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
  // Whether consumers are short of registers by a few.
  static constexpr bool kScarce = kBias && kConsumers > 2;
  template <int kCount>
  using Cursor = std::conditional_t<kScarce, PackedCursor<kCount>, StageCursor<kCount>>;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocks = kConfig.blocks;

  // Whether O leaves through the place of its Q: while it does, the next Q needs another.
  static constexpr bool kStoreThroughQ = kStagesQ > 1 && kDv <= kD && !kBias;

  // Registers of a multiprocessor go where the accumulators are. What setmaxnreg hands out is what
  // the launch took: the same for every thread, a multiple of 8.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : kBits ? 64 : kScarce ? 56 : 40;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
  static_assert(kConsumerRegisters <= 256);
  // D256 has no registers for the producer of pages.
  static constexpr bool kReadsPages = kD <= kSm90PagesDimMax && !kDropout && !kBits && !kBias;
  // A register that D256 does not have for what is read once for each tile of keys.
  static constexpr bool kCapInRegister = kD < 256;

  // Boxes of the copy engine: whole 128-byte rows where the head dim allows.
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
  static constexpr int kBiasCols = kKeys % 64 == 0 ? 64 : 32;  // keys, of a box
  // With one place for a tile, each warpgroup has a part of its own, which is loaded again as soon
  // as that has been added.
  static constexpr int kBiasParts = kBiasStages == 1 ? kConsumers : 1;
  static constexpr int kBiasRows = kRows / kBiasParts;
  static constexpr int kBoxBytesBias = kBiasRows * kBiasCols * 2;
  static constexpr int kBytesBias = kBiasRows * kKeys * 2;  // of a part
  static constexpr int kOffsetState = kOffsetBias + kBiasStages * kBiasParts * kBytesBias;

  static_assert(!kBias || kStages % (2 * (kBias ? kBiasStages : 1)) == 0,
                "K's place tells the bias's");
  static_assert(kD % 32 == 0 && kDv % 32 == 0 && kKeys % 16 == 0);
  static_assert(!kStoreThroughQ || kCols == kColsV, "O lies as Q did");
  // A place whose Q went to registers is not freed before O has left through it, or (with a bias)
  // the last scores are there.
  static_assert(!kQueryInRegisters || kStoreThroughQ || kBias);
};

// The keys that a row sees, in 32 bits: lengths are at most 2^30 (limits.h). As VisibleKeys.
struct Window {
  int32_t left, right;  // -1: not bounded
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

// The warps that read a mask of bits (mask_bits.cuh), and how many results of a scan may wait to be
// used.
inline constexpr int kSm90BitsWarps = 2;
inline constexpr int kSm90Scans = 4;

// Where a mask's bits of a head are.
struct BitRows {
  const uint8_t* data;  // of row 0
  int64_t stride;       // bytes from row to row; 0: all rows have the same
  int32_t row_bytes;

  // Whether all rows begin at multiples of so many bytes.
  template <int kBytes>
  __device__ __forceinline__ bool IsAligned() const {
    return (reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride)) % kBytes == 0;
  }
};

// The scanner's result: one bit for each tile of keys that it looked at together.
struct ScannedTiles {
  uint32_t some;  // a row sees a key
  uint32_t all;   // every row sees every key
};

// What is known of a tile of query rows before its data: written by the scheduler.
struct Sm90Work {
  // For the consumers.
  bool end;      // there are no more tiles
  bool vectors;  // rows of O can be written 16 bytes at a time
  bool has_sink;
  int32_t row_begin;
  int32_t q_len, q_rows;
  int32_t tile_begin, tile_end;  // tiles of keys that some row sees
  int32_t dim_v;
  float to_log2;     // weight = 2^(score * to_log2 - base)
  float cap_factor;  // softcap: score = tanh(q.k * cap_factor); 0 without
  float sink;
  Window window;
  uint16_t* o;  // of the head's first row
  int64_t o_stride;
  float* lse;               // likewise; null: not wanted
  int32_t o_head, o_batch;  // in the tensor
  const Attention* attention;
  // For the producer.
  const TensorMaps* maps;
  bool new_maps;  // not those of the block's last tile, and in memory that is rewritten
  int32_t q_row, q_head, q_batch;  // in the tensors
  int32_t k_row, k_head, k_batch;
  int32_t v_head, v_batch;
  bool patch;  // the last tile holds rows that are beyond the length, but not beyond the tensor
  int32_t page_shift;  // keys in pages: of 2^page_shift
};

// Under a mask of bits (mask_bits.cuh), what scheduler, scanner, producer, arranger and consumers
// tell each other of it.
template <class T, bool = T::kBits>
struct Sm90BitsState {};
template <class T>
struct Sm90BitsState<T, true> {
  BitRows rows[2];  // for each description
  ScannedTiles scans[kSm90Scans];
  int32_t entries[T::kStages];  // for each place of K, see MaskBits::EntryOf
  uint2 seen[T::kStages][T::kRows / 16]
            [32];              // likewise, see MaskBits::seen; of the consumers' warps
  uint4 scanned[T::kRows][8];  // the scanner's
  Barrier full_scan[kSm90Scans], empty_scan[kSm90Scans];
};

// With a bias (bias.cuh), what its loader and consumers tell each other of it, for each place:
// stage * kBiasParts + part.
template <class T, bool = T::kBias>
struct Sm90BiasState {};
template <class T>
struct Sm90BiasState<T, true> {
  static constexpr int kPlaces = T::kBiasStages * T::kBiasParts;
  int32_t kinds[kPlaces];  // BiasKind
  Barrier full[kPlaces], empty[kPlaces];
};

// After the tiles in shared memory.
template <class T>
struct Sm90State {
  static constexpr int kSlots = 2;  // one tile is described while another is computed
  Sm90Work work[kSlots];
  Barrier full_work[kSlots], empty_work[kSlots];
  Barrier full_q[T::kStagesQ], empty_q[T::kStagesQ];
  Barrier tail;  // of a V tile that the producer completes itself
  Barrier full_k[T::kStages], empty_k[T::kStages];
  Barrier full_v[T::kStages], empty_v[T::kStages];
  Sm90BitsState<T> bits;
  Sm90BiasState<T> bias;
};

// A block's shared memory: where its tiles and barriers are, from the address of the first tile on.
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
inline constexpr int kSm90SharedBytesMax = 227 * 1024;  // of a block

}  // namespace attend::cuda

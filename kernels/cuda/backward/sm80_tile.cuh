// SPDX-License-Identifier: Apache-2.0
//
// The backward pass by mma.sync: tiles, a block's work, and its copies. Device code.
//
// One kernel template for all gradients. A block *owns* rows of two tensors and walks the rows of
// two *others*: for dK and dV it owns keys (rows of K and V) and walks Q and dO of all heads of the
// group; for dQ it owns rows of Q and dO, and walks K and V. In either case
//
//   S = own[0] other[0]^T    dP = own[1] other[1]^T    dK or dQ += dS other[0]
//   dV += P other[1]
//
// with owned rows down, so that P and dS leave one product as the register operand of the next.

#pragma once

#include <cstdint>

#include "kernels/cuda/backward/band.cuh"
#include "kernels/cuda/backward/launch_list.cuh"
#include "kernels/cuda/sm80/tile.cuh"

namespace attend::cuda::backward {

// Kernel classes: without score terms, with all terms, and with dropout as well.
enum class Class { kPlain, kGeneral, kDropout };

// The kernel's outputs. Sums of both dK and dV do not fit the registers if D and Dv are large.
// kMeasure computes terms of query rows (measure.cuh) and no gradient.
enum class Leaves { kQueries, kKeysAndValues, kKeys, kValues, kMeasure };

struct MmaConfig {
  Leaves leaves;
  int dim;     // upper bound of D: a multiple of 32
  int dim_v;   // upper bound of Dv
  int warps;   // per block
  int slices;  // of 16 owned rows, per warp
  int tile;    // other rows per stage, of which there are two
  int step;    // other rows processed at a time: a multiple of 16
  int blocks;  // per multiprocessor
  int share = 1;
};

// Layout for sm80/tile.cuh's copies: adjacent threads copy each row's span of chunks.
template <int kColumns, int kThreads>
struct CopyShape {
  static constexpr int kDim = kColumns;
  using Row = TileRow<kDim>;
  static constexpr int kPassRows = kThreads / Row::kSpan;
  static constexpr int kPassSpans = Row::kChunks / Row::kSpan;
};

template <MmaConfig kConfig>
struct MmaTile {
  static constexpr bool kMeasures = kConfig.leaves == Leaves::kMeasure;
  static constexpr bool kOwnsKeys = kConfig.leaves != Leaves::kQueries && !kMeasures;
  static constexpr bool kWantsFirst = kConfig.leaves != Leaves::kValues;  // dP, for dQ or dK
  static constexpr bool kWantsSecond =
      kConfig.leaves == Leaves::kValues || kConfig.leaves == Leaves::kKeysAndValues;  // dV
  static constexpr int kDim = kConfig.dim;
  static constexpr int kDimV = kConfig.dim_v;
  static constexpr int kThreads = 32 * kConfig.warps;
  static constexpr int kBlocks = kConfig.blocks;
  static constexpr int kSlices = kConfig.slices;
  static constexpr int kWarpRows = 16 * kSlices;
  static constexpr int kShare = kConfig.share;
  static constexpr int kOwn = kConfig.warps / kShare * kWarpRows;
  static constexpr int kOther = kConfig.tile;
  static constexpr int kStep = kConfig.step;
  static constexpr int kStepBlocks = kStep / 8;
  using First = CopyShape<kDim, kThreads>;
  using Second = CopyShape<kDimV, kThreads>;
  using FirstRow = typename First::Row;
  using SecondRow = typename Second::Row;

  // dV does not need V.
  static constexpr int kOffsetOwn2 = kOwn * FirstRow::kBytes;
  static constexpr int kOffsetStages = kOffsetOwn2 + (kWantsFirst ? kOwn * SecondRow::kBytes : 0);
  static constexpr int kOffset2 = kOther * FirstRow::kBytes;  // in a stage
  static constexpr int kOffsetTerms = kOffset2 + kOther * SecondRow::kBytes;
  static constexpr int kTermBytes = kOwnsKeys ? 2 * kOther * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kStageBytes = kOffsetTerms + kTermBytes;
  // Per 16 of a step's others, for the exchange between warps that share rows.
  static constexpr int kKinds = (kWantsFirst ? 1 : 0) + (kWantsSecond ? 1 : 0);
  static constexpr int kGivenBytes = kKinds * kSlices * kStep / 16 * 32 * 16;
  static constexpr int kOffsetGiven = kOffsetStages + 2 * kStageBytes;
  static constexpr int kSharedBytes =
      kOffsetGiven + (kShare == 2 ? kConfig.warps * kGivenBytes : 0);

  static_assert(kShare == 1 ||
                (kShare == 2 && kOther == 2 * kStep && kDim % 128 == 0 && kDimV % 128 == 0));
  static_assert(kStep % 16 == 0 && kOther % kStep == 0 && kSharedBytes <= 227 * 1024);
  static_assert(kOwn % First::kPassRows == 0 && kOwn % Second::kPassRows == 0);
  static_assert(kOther % First::kPassRows == 0 && kOther % Second::kPassRows == 0);
};

// An item of a launch.
struct MmaParams {
  BackwardPass pass;
  int tiles;    // of a head's owned rows
  int section;  // heads whose tiles run side by side
};

// Description of a block's work: in shared memory, as accumulators need all registers.
struct MmaWork {
  int b, head;              // of the first query head
  int heads;                // query heads to walk
  int64_t head_strides[2];  // bytes between heads of the others' rows
  sm80::Source own[2], other[2];
  Band band;
  int offset;      // of the diagonal
  int begin;       // first owned row
  int own_length;  // the sequence's length in owned rows
  int own_count;   // rows to write
  int other_length;
  int other_begin, other_end;  // rows that some owned row sees, begin rounded down to a tile
  const float* lse;            // terms, from row 0 of the first head on
  const float* less;
  const float* shift;
  bool shifted;   // some rows have one
  int64_t terms;  // per head
  float to_log2;  // factor of a product of Q and K, without score terms
  float factor;   // factor of a product of Q and K that gives a score
};

// The rows [begin, end) of the others that an owned row sees.
template <class T>
__device__ __forceinline__ int SeenBegin(const Band& band, int row) {
  return T::kOwnsKeys ? band.RowBegin(row) : band.KeyBegin(row);
}
template <class T>
__device__ __forceinline__ int SeenEnd(const Band& band, int row) {
  return T::kOwnsKeys ? band.RowEnd(row) : band.KeyEnd(row);
}

// A block's head and tile: a section's heads side by side. Under a causal mask the first keys and
// the last rows see most, and go first.
struct MmaPlace {
  int64_t head;  // counted over sequences
  int tile;
};
template <class T>
__device__ __forceinline__ MmaPlace PlaceOf(const MmaParams& params, uint32_t of_launch) {
  const Problem& p = params.pass.attention.problem;
  const auto heads = static_cast<int>(p.batch * (T::kOwnsKeys ? p.heads_kv : p.heads_q));
  const auto block = static_cast<int>(of_launch - params.pass.first_block);
  const int begin = block / params.tiles / params.section * params.section;
  const int side_by_side = min(params.section, heads - begin);
  const int rest = block - begin * params.tiles;
  const int tile = rest / side_by_side;
  return {begin + rest % side_by_side, T::kOwnsKeys ? tile : params.tiles - 1 - tile};
}

// Rows of a head; `fast` only if it holds for all heads of the group.
__device__ __forceinline__ sm80::Source OtherSource(const ConstTensorView& view, int64_t b,
                                                    int64_t h, int64_t row, int64_t dim) {
  sm80::Source source = sm80::SourceOf(view, b, h, row, dim);
  source.fast = source.fast && view.stride_h % 8 == 0;
  return source;
}

// One thread.
template <class T>
__device__ __forceinline__ void SetUp(const MmaParams& params, uint32_t block, MmaWork& work) {
  const BackwardPass& pass = params.pass;
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const MmaPlace place = PlaceOf<T>(params, block);
  const int64_t heads = T::kOwnsKeys ? p.heads_kv : p.heads_q;
  const int64_t b = place.head / heads;
  const int64_t owner = place.head % heads;
  const int64_t h = T::kOwnsKeys ? owner * p.group() : owner;
  const int64_t kv_head = T::kOwnsKeys ? owner : owner / p.group();
  const Sequence s = SequenceOf(a, b);
  const ConstTensorView& d_o = pass.gradients.d_o;
  constexpr int kKeys = T::kOwnsKeys ? 0 : 1;  // index of the keys' pair below
  sm80::Source sources[2][2] = {
      {OtherSource(a.k, b, kv_head, s.k_row, p.dim),
       OtherSource(a.v, b, kv_head, s.k_row, p.dim_v)},
      {OtherSource(a.q, b, h, s.q_row, p.dim), OtherSource(d_o, b, h, s.q_row, p.dim_v)}};
  for (int n = 0; n < 2; ++n) {
    work.own[n] = sources[kKeys][n];
    work.other[n] = sources[1 - kKeys][n];
  }
  work.b = static_cast<int>(b);
  work.head = static_cast<int>(h);
  work.heads = T::kOwnsKeys ? static_cast<int>(p.group()) : 1;
  work.head_strides[0] = 2 * a.q.stride_h;
  work.head_strides[1] = 2 * d_o.stride_h;
  work.band = Band(p, s);
  work.offset = static_cast<int>(s.offset);
  work.begin = place.tile * T::kOwn;
  const int64_t k_rows = p.packed ? s.k_len : p.len_k;
  work.own_length = static_cast<int>(T::kOwnsKeys ? s.k_len : s.q_len);
  work.own_count = static_cast<int>(T::kOwnsKeys ? k_rows : s.q_rows);
  work.other_length = static_cast<int>(T::kOwnsKeys ? s.q_len : s.k_len);
  const int64_t term = TermIndex(p, s, b, h, 0);
  work.lse = pass.lse + term;
  work.less = pass.less + term;
  work.shift = pass.shift + term;
  work.shifted = pass.flags->shifted != 0;
  work.terms = TermsOfHead(p);
  work.to_log2 = p.scale * kLog2E;
  work.factor = p.scale;
  work.other_begin = work.other_end = 0;
  if (work.begin >= work.own_length) return;
  const int last = min(work.begin + T::kOwn, work.own_length) - 1;
  const int begin = SeenBegin<T>(work.band, work.begin);
  const int end = SeenEnd<T>(work.band, last);
  if (begin >= end) return;
  work.other_begin = begin / T::kOther * T::kOther;
  work.other_end = end;
}

// ---- a step -------------------------------------------------------------------------------------

// Products of one step: [slice][eight others][fragment, see MultiplyAdd].
template <class T>
using StepSums = float[T::kSlices][T::kStepBlocks][4];
// The same, packed as the next product's operand: [slice][eight others][half].
template <class T>
using StepPairs = uint32_t[T::kSlices][T::kStepBlocks][2];

// The thread's owned row of half `half` of slice `slice`.
template <class T>
__device__ __forceinline__ int OwnRow(const MmaWork& work, int slice, int half) {
  const int thread = ThreadIndex();
  return work.begin + thread / 32 / T::kShare * T::kWarpRows + 16 * slice + 8 * half +
         thread % 32 / 4;
}

// ---- copies -------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void LoadOwn(uint32_t shared, const MmaWork& work) {
  sm80::LoadRows<typename T::First, T::kOwn>(shared, work.own[0], work.begin, work.own_length);
  if constexpr (T::kWantsFirst) {
    sm80::LoadRows<typename T::Second, T::kOwn>(shared + T::kOffsetOwn2, work.own[1], work.begin,
                                                work.own_length);
  }
}

// Loads rows [row, row + T::kOther) of one query head of the group, and their terms.
template <class T>
__device__ __forceinline__ void LoadOthers(uint32_t stage, const MmaWork& work, int head, int row) {
  sm80::Source sources[2] = {work.other[0], work.other[1]};
  if constexpr (T::kOwnsKeys) {
    for (int n = 0; n < 2; ++n) sources[n].data += head * work.head_strides[n];
    constexpr int kChunks = T::kOther / 4;
    const int thread = ThreadIndex();
    if (thread < 2 * kChunks) {
      const float* const terms = thread < kChunks ? work.lse : work.less;
      const int first = row + thread % kChunks * 4;
      // Other sequences' terms may be NaN, which a weight of 0 does not mask.
      CopyAsync16(stage + T::kOffsetTerms + 16 * thread, terms + head * work.terms + first,
                  first < work.other_length);
    }
  }
  sm80::LoadRows<typename T::First, T::kOther>(stage, sources[0], row, work.other_length);
  sm80::LoadRows<typename T::Second, T::kOther>(stage + T::kOffset2, sources[1], row,
                                                work.other_length);
}

}  // namespace attend::cuda::backward

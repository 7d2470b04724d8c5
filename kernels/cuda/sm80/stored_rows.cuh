// SPDX-License-Identifier: Apache-2.0
//
// Rows that cuda_flash_sm80's tiles could not represent, examined after their tile has been stored
// and its accumulators are free: non-finite outputs stay if the values explain them; otherwise the
// rows are recomputed (ragged/redo_rows.cuh). Uses local memory and loops that are not unrolled.
// Device code; a warp calls each function together.

#pragma once

#include "kernels/cuda/ragged/redo_rows.cuh"

namespace attend::cuda::sm80 {

// Sixteen rows of a query head, for one warp. Output is laid out as RowRedo's between Run and
// Arrange.
template <class Element, int kBlocks, bool kGeneral, bool kPaged, bool kDropout>
class StoredRows : public RowRedo<Element, kBlocks, kGeneral, kPaged, kDropout> {
  using Redo = RowRedo<Element, kBlocks, kGeneral, kPaged, kDropout>;
  using Redo::a, Redo::b, Redo::h, Redo::s, Redo::lane, Redo::row, Redo::v;
  using Redo::begin, Redo::end, Redo::key_begin, Redo::key_end, Redo::kAll;
  using Redo::KeyAt, Redo::LoadEight;

 public:
  using Redo::Redo;
  using typename Redo::Output;

  // Loads the rows' stored output; 0 where there is none.
  __device__ __forceinline__ void LoadOutput(Output& o) const {
    const auto dim = static_cast<int>(a.problem.dim_v);
    const auto* const data = static_cast<const uint16_t*>(a.o.data);
    const auto first = reinterpret_cast<uint64_t>(data + OutputAt(0));
    const bool wide = a.problem.o_dtype() != DType::kFloat32 && dim % 8 == 0 &&
                      ((first | 2 * a.o.stride_l) & 15) == 0;
#pragma unroll 4
    for (int g = 0; g < kBlocks / 4; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int column = FirstColumn(g);
        const bool exists = row[r] < s.q_len && column < dim;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (wide && exists) {
          x = __ldcg(reinterpret_cast<const uint4*>(data + OutputAt(r) + column));
        }
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = Unpack<Element>(words[i]);
          o[4 * g + i][2 * r] = pair.x;
          o[4 * g + i][2 * r + 1] = pair.y;
        }
      }
    }
    if (wide) return;
#pragma unroll 1
    for (int n = 0; n < 4 * kBlocks; ++n) {
      const int r = n % 4 / 2, column = FirstColumn(n / 16) + n % 16 / 4 * 2 + n % 2;
      const bool exists = (r == 0 ? row[0] : row[1]) < s.q_len && column < dim;
      if (exists) o[n / 4][n % 4] = StoredAt((r == 0 ? OutputAt(0) : OutputAt(1)) + column);
    }
  }
  __device__ __forceinline__ void StoreOutput(const Output& o, const float (&factors)[2]) const {
    const auto dim = static_cast<int>(a.problem.dim_v);
#pragma unroll 1
    for (int g = 0; g < kBlocks / 4; ++g) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int r = n / 8, column = FirstColumn(g) + n % 8;
        if (row[r] >= s.q_len || column >= dim) continue;
        StoreGlobal(a.o.data, a.problem.o_dtype(), OutputAt(r) + column,
                    o[4 * g + n % 8 / 2][2 * r + n % 2] * factors[r]);
      }
    }
  }

  // Whether every non-finite output is explained by such a value that its row sees: NaN by NaN, Inf
  // by the same Inf (a hidden Inf, or one without weight, would have given NaN).
  __device__ __forceinline__ bool ValuesExplain(const Output& o) const {
    uint64_t open[2] = {0, 0};  // bit n: column n of the lane's row is unexplained
#pragma unroll 1
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const bool found = NonFinite(o[j][n]);
        open[n / 2] |= static_cast<uint64_t>(found) << (2 * j + n % 2);
      }
    }
    uint32_t blocks = OpenBlocks(open);
    for (int in_vain = 0; blocks != 0;) {
      const uint32_t block = blocks & -blocks;
      int key = begin - 1;
      do {
        key = NextNonFinite(key + 1, 8 * (__ffs(static_cast<int>(block)) - 1));
        if (key >= end || in_vain > kInVainMost) return false;
        Explain(key, o, open);
        const uint32_t left = OpenBlocks(open);
        if (left == blocks) ++in_vain;
        blocks = left;
      } while ((blocks & block) != 0);
    }
    return true;
  }

  // After Run: sets which rows' outputs are defined.
  __device__ __forceinline__ void SetCounts(RowEnd (&ends)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ends[r].counts = row[r] < s.q_len && ends[r].state.max != NegativeInfinity();
    }
  }

  // Normalises, and stores O and LSE.
  __device__ __forceinline__ void Finish(const Output& o, const RowEnd (&ends)[2]) const {
    const Problem& p = a.problem;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      SoftmaxState<float> total = ends[r].state;
      factors[r] = OutputFactor(total, ends[r].unit, p.has_sinks, p.has_sinks ? a.sinks[h] : 0.0f);
      factors[r] = KeepFinite<!std::is_same_v<Element, __half>>(factors[r], ends[r].largest);
      if constexpr (kDropout) factors[r] *= DropoutScale(p.dropout);
      if (p.return_lse && lane % 4 == 0 && row[r] < s.q_len) {
        a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + row[r]] = LogSumExp(total);
      }
    }
    StoreOutput(o, factors);
  }

 private:
  static constexpr int kInVainMost = 32;  // keys that explain nothing, before the search gives up
  static constexpr int kAtOnce = kBlocks <= 8 ? 4 : 8;  // keys per lane and step

  // The first of the lane's eight columns in group `g`.
  __device__ __forceinline__ int FirstColumn(int g) const { return 32 * g + lane % 4 * 8; }
  // The first element of the lane's row `r` of O.
  __device__ __forceinline__ int64_t OutputAt(int r) const {
    return b * a.o.stride_b + h * a.o.stride_h + (s.q_row + row[r]) * a.o.stride_l;
  }

  __device__ __forceinline__ float StoredAt(int64_t index) const {
    const DType dtype = a.problem.o_dtype();
    if (dtype == DType::kFloat32) return __ldcg(static_cast<const float*>(a.o.data) + index);
    return Widen(dtype, __ldcg(static_cast<const uint16_t*>(a.o.data) + index));
  }

  // Whether the lane's row `r` gives the key any weight.
  __device__ __forceinline__ bool Sees(int r, int key) const {
    if (key < key_begin[r] || key >= key_end[r]) return false;
    if (kDropout && !KeepsWeight(a, b, h, row[r], key)) return false;
    return !kGeneral || !a.problem.has_bias || BiasOf(r, key) != NegativeInfinity();
  }
  __device__ __forceinline__ float BiasOf(int r, int key) const {
    return LoadGlobalBias(
        a.bias, b * a.bias.stride_b + h * a.bias.stride_h + row[r] * a.bias.stride_q + key);
  }
  // The first key from `first` on with a non-finite value among the eight from `column` on; `end`
  // if none.
  __device__ __forceinline__ int NextNonFinite(int first, int column) const {
    const int dim = static_cast<int>(a.problem.dim_v);
#pragma unroll 1
    for (; first < end; first += 32 * kAtOnce) {
      bool found[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int mine = first + 32 * n + lane;
        found[n] = AnyNonFinite<Element>(
            LoadEight(KeyAt(a.v, v, mine, end), column, mine < end ? dim : 0));
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const uint32_t lanes = __ballot_sync(kAll, found[n]);
        if (lanes != 0) return first + 32 * n + __ffs(static_cast<int>(lanes)) - 1;
      }
    }
    return end;
  }

  // Clears the bits of `open` that a key's values explain.
  __device__ __forceinline__ void Explain(int key, const Output& o, uint64_t (&open)[2]) const {
    const bool sees[2] = {Sees(0, key), Sees(1, key)};
#pragma unroll 1
    for (int g = 0; g < kBlocks / 4; ++g) {
      if (((open[0] | open[1]) >> 8 * g & 0xff) == 0) continue;
      const uint4 x =
          LoadEight(KeyAt(a.v, v, key, end), FirstColumn(g), static_cast<int>(a.problem.dim_v));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int r = n / 8, m = n % 8;
        const float2 pair = Unpack<Element>(words[m / 2]);
        const float value = m % 2 == 0 ? pair.x : pair.y;
        const float got = o[4 * g + m / 2][2 * r + m % 2];
        const bool explained = sees[r] && (isnan(got) ? isnan(value) : got == value);
        open[r] &= ~(static_cast<uint64_t>(explained) << (8 * g + m));
      }
    }
  }

  // Bit n: some row of the warp has an unexplained column in the n-th block of eight.
  __device__ __forceinline__ uint32_t OpenBlocks(const uint64_t (&open)[2]) const {
    const uint64_t both = open[0] | open[1];
    uint32_t blocks = 0;
#pragma unroll 1
    for (int g = 0; g < kBlocks / 4; ++g) {
      blocks |= (both >> 8 * g & 0xff) != 0 ? 1u << (4 * g + lane % 4) : 0u;
    }
    return __reduce_or_sync(kAll, blocks);
  }
};

// Whether one of the warp's rows must be repaired; `marked`: whether one is marked.
__device__ __forceinline__ bool AnyToRepair(const RowEnd (&ends)[2], bool* marked) {
  constexpr unsigned kAll = 0xffffffffu;
  const bool mine = (ends[0].counts && ends[0].marked) || (ends[1].counts && ends[1].marked);
  if (!__any_sync(kAll, mine || Overflowed(ends[0]) || Overflowed(ends[1]))) return false;
  *marked = __any_sync(kAll, mine);
  return true;
}

// Repairs the warp's stored rows: recomputes them if they are marked or not explained.
template <class Rows>
__device__ __forceinline__ void RepairRows(const Attention& a, int b, int h, int first_row,
                                           bool marked) {
  const Rows rows(a, b, h, first_row);
  typename Rows::Output o;
  rows.LoadOutput(o);
  if (!marked && rows.ValuesExplain(o)) return;
  RowEnd ends[2];
  const float small = rows.SmallUnit();
  float unit = marked ? 1.0f : small;
#pragma unroll 1
  for (bool again = true; again; unit = small) {
    rows.Run(unit, o, ends);
    rows.SetCounts(ends);
    again = unit != small && __any_sync(0xffffffffu, Overflowed(ends[0]) || Overflowed(ends[1]));
  }
  rows.Finish(o, ends);
}

}  // namespace attend::cuda::sm80

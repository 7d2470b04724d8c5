// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90, consumers: a warpgroup computes 64 query rows. Overlap decides what a tile's
// softmax runs under: the previous tile's output product together with what the other warpgroups
// have issued, or only the latter.

#pragma once

#include "kernels/contract/softmax_state.h"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/ptx/tanh.cuh"
#include "kernels/cuda/ragged/redo_rows.cuh"
#include "kernels/cuda/sm90/bias.cuh"
#include "kernels/cuda/sm90/general.cuh"
#include "kernels/cuda/sm90/mask_bits.cuh"
#include "kernels/cuda/sm90/softmax.cuh"
#include "kernels/cuda/sm90/store.cuh"
#include "kernels/cuda/sm90/tile.cuh"

namespace attend::cuda {

template <class T, bool kBfloat16>
struct Consumer {
  static constexpr int kScores = T::kKeys / 2;  // per thread: two rows, 8 apart
  static constexpr int kWeights = T::kKeys / 4;
  static constexpr int kOutputs = T::kDv / 2;
  static constexpr int kTurnBarrier = 1;   // named barriers, one per warpgroup
  static constexpr int kGroupBarrier = 5;  // one per warpgroup, internal to it

  char* shared;
  const Sm90SharedStorage<T> storage;
  const int group;  // consumer warpgroup, from 0
  const int lane;
  typename T::template Cursor<T::kStages> k = {}, v = {};
  typename T::template Cursor<T::kStagesQ> q = {};

  // The current tile.
  int row;                   // the thread's first row; the second is row + 8
  float cap_factor;          // CapFactor
  int full_begin, full_end;  // keys that every row of this warpgroup sees
  int tile_begin, tile_end;  // key tiles that some row of it sees; at least one

  float scores[kScores];  // q.k, then weights
  uint32_t weights[kWeights];
  float output[kOutputs];
  SoftmaxRows<kScores, T::kBias && kBfloat16> rows;
  uint32_t query[T::kQueryInRegisters ? T::kD / 16 : 1][4];  // Q's fragments
  DropoutLane dropout = {};                                  // if T has dropout
  MaskBits<T> bits;                                          // likewise
  BiasTiles<T> bias;                                         // likewise
  GeneralTile<T> general;                                    // likewise

  // ---- score ----------------------------------------------------------------------------------

  // Loads Q's fragments, once per tile of rows.
  __device__ __forceinline__ void LoadQuery() {
    if constexpr (T::kQueryInRegisters) {
      constexpr int kChunks = T::kCols / 8;  // 16-byte chunks per row
      const int mine = 16 * (threadIdx.x / 32 % 4) + lane % 16;
      const int swizzle = kChunks == 8 ? mine % 8 : mine / 2 % 4;
      const uint32_t at = storage.Q(q.stage()) + (group * 64 + mine) * 2 * T::kCols;
#pragma unroll
      for (int n = 0; n < T::kD / 16; ++n) {
        const int chunk = 2 * n % kChunks + lane / 16 ^ swizzle;
        LoadMatrix(at + 2 * n / kChunks * T::kBoxBytesQ + 16 * chunk, query[n]);
      }
    }
  }

  __device__ __forceinline__ void IssueScores() {
    const uint32_t keys = storage.K(k.stage());
    const auto a = SmemTile<T::kCols>::AlongRows(storage.Q(q.stage()) + group * 64 * 2 * T::kCols);
    const auto b = SmemTile<T::kCols>::AlongRows(keys);
    using Product = Wgmma<T::kKeys, kBfloat16>;
    WgmmaFence();
#pragma unroll
    for (int box = 0; box < T::kBoxesQK; ++box) {
#pragma unroll
      for (int n = 0; n < T::kCols / 16; ++n) {
        const uint64_t key = b.At(box * T::kBoxBytesK + 32 * n);
        const bool more = box > 0 || n > 0;
        if constexpr (T::kQueryInRegisters) {
          Product::template Registers<false>(scores, query[box * T::kCols / 16 + n], key, more);
        } else {
          Product::template Shared<false>(scores, a.At(box * T::kBoxBytesQ + 32 * n), key, more);
        }
      }
    }
    WgmmaCommit();
  }

  // ---- rescale and accumulate -----------------------------------------------------------------

  __device__ __forceinline__ void IssueOutput(bool accumulate) {
    const uint32_t values = storage.V(v.stage());
    const auto b = SmemTile<T::kColsV>::DownRows(values, T::kBoxBytesV);
    WgmmaFence();
#pragma unroll
    for (int n = 0; n < T::kKeys / 16; ++n) {
      Wgmma<T::kDv, kBfloat16>::template Registers<true>(
          output, weights + 4 * n, b.At(16 * 2 * T::kColsV * n), accumulate || n > 0);
    }
    WgmmaCommit();
  }

  // The warp has made its last read of Q; the stage is free unless O needs it.
  __device__ __forceinline__ void LeaveQuery() {
    if constexpr (!T::kStoreThroughQ) Release(storage.EmptyQ(q.stage()));
  }

  // If O is stored through Q's stage: frees it once the stores have read it. The thread that issued
  // them waits for its warpgroup, whose warps have synchronised since.
  __device__ __forceinline__ void LeaveStored(int stage) {
    if (threadIdx.x % 128 != 0) return;
    WaitStoresRead();
    Arrive(storage.EmptyQ(stage));
  }

  // One arrival per warp: it has waited for its part of the products.
  __device__ __forceinline__ void Release(uint32_t barrier) {
    if (lane == 0) Arrive(barrier);
  }

  // Score terms and mask, and their effect on the rows' bases. Returns as SoftmaxRows::Follow.
  __device__ __forceinline__ bool FinishScores(const Sm90Work& work, int tile,
                                               float (&rescale)[2]) {
    const float cap = T::kCapInRegister ? cap_factor : work.cap_factor;
    if constexpr (T::kGeneral) {
      const int key = tile * T::kKeys;
      const auto mask = [&] {
        if (key >= full_begin && key + T::kKeys <= full_end) return;
        MaskScores(work.window, row, key + 2 * (lane % 4), key < full_begin, scores);
      };
      return general.Finish(cap, key - row - work.window.offset, mask, rows, scores, rescale);
    } else {
      if (cap != 0.0f) CapProducts(cap, scores);
      const int key = tile * T::kKeys;
      if constexpr (T::kBits) bits.Remove(scores);
      if constexpr (T::kBias) {
        bias.Take(shared, storage, group, k.stage() - 1);
        bias.template Add<kBfloat16>(rows.to_log2, scores);
      }
      if (key < full_begin || key + T::kKeys > full_end) {
        MaskScores(work.window, row, key + 2 * (lane % 4), key < full_begin, scores);
      }
      const bool risen = rows.Follow(scores, rescale);
      if constexpr (T::kBias) {
        if (kBfloat16 && risen && rows.AnyWithoutBase()) {
          bias.Take(shared, storage, group, k.stage() - 1);  // again, to save registers
          bias.MarkLowRows(work.window.k_len - key, rows.base);
        }
        bias.Leave(storage, group, k.stage() - 1);
      }
      return risen;
    }
  }

  __device__ __forceinline__ bool ScoresToWeights(const Sm90Work& work, int tile,
                                                  float (&rescale)[2]) {
    const bool risen = FinishScores(work, tile, rescale);
    Exponentiate(tile);
    return risen;
  }

  // Turns scores into weights.
  __device__ __forceinline__ void Exponentiate(int tile) {
    rows.Exponentiate(TileBases(general, rows), scores);
    if constexpr (T::kDropout) DropWeights(dropout, tile * T::kKeys, scores);
  }

  __device__ __forceinline__ void PackWeights() {
#pragma unroll
    for (int n = 0; n < kWeights; ++n) {
      weights[n] = PackPair<kBfloat16>(scores[2 * n], scores[2 * n + 1]);
    }
  }

  // Turns between warpgroups: to issue products (kOutputTurns), one per key tile but the first, or
  // to exponentiate (kSoftmaxTurns), one per key tile. Skipped tiles count, so that all warpgroups
  // take equally many turns.
  __device__ __forceinline__ void AwaitTurn() {
    if constexpr (T::kTurns) SyncNamed(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void PassTurn() {
    if constexpr (T::kTurns) {
      ArriveNamed(kTurnBarrier + (group + 1) % T::kConsumers, 256);
    }
  }

  // Frees K's stage: the scores of tile n are complete.
  __device__ __forceinline__ void LeaveKeys(int n) {
    Release(storage.EmptyK(k.stage()));
    k.Step();
    if (n == tile_begin && !T::kBits) LeaveQuery();
  }

  // Reads which tile is in the next stage of K. False: the tile of rows has no more.
  __device__ __forceinline__ bool TakeEntry() {
    Wait(storage.FullK(k.stage()), k.parity());
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    bits.entry = state.bits.entries[k.stage()];
    if (bits.entry != MaskBits<T>::kEndEntry) return true;
    Release(storage.EmptyK(k.stage()));
    k.Step();
    LeaveQuery();
    return false;
  }

  // Reads the mask bits of the current stage, while its product runs and before it is freed.
  __device__ __forceinline__ void TakeBits() {
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    bits.seen = state.bits.seen[k.stage()][threadIdx.x / 32 - 4][lane];
  }

  // The key tile after tile n; below tile_begin if none.
  __device__ __forceinline__ int NextTile(int n) {
    if constexpr (T::kBits) {
      return TakeEntry() ? bits.tile() : tile_begin - 1;
    } else {
      return n - 1;
    }
  }

  // The output product of the last tile.
  __device__ __forceinline__ void FinishOutput(bool accumulate) {
    IssueOutput(accumulate);
    WgmmaWait<0>();
    HoldRegisters(output);
    Release(storage.EmptyV(v.stage()));
    v.Step();
  }

  // Passes over key tiles that only other warpgroups see.
  __device__ __forceinline__ void Skip(int count) {
    for (; count > 0; --count) {
      if constexpr (T::kBias) {
        bias.Take(shared, storage, group, k.stage());
        bias.Leave(storage, group, k.stage());
      }
      Wait(storage.FullK(k.stage()), k.parity());
      Release(storage.EmptyK(k.stage()));
      k.Step();
      AwaitTurn();
      PassTurn();
      Wait(storage.FullV(v.stage()), v.parity());
      Release(storage.EmptyV(v.stage()));
      v.Step();
    }
  }

  // Loops over the warpgroup's key tiles. Step n issues the scores of tile n and the output of tile
  // n + 1, whose weights are ready; the softmax of tile n then runs under the latter, and under
  // what the other warpgroups have issued.
  __device__ __forceinline__ void AccumulateUnderOutput(const Sm90Work& work) {
    float rescale[2];
    int n = tile_end - 1;
    if constexpr (T::kBits) n = bits.tile();
    LeaveKeys(n);
    ScoresToWeights(work, n, rescale);
    PackWeights();
    Wait(storage.FullV(v.stage()), v.parity());
    bool accumulate = false;
    for (n = NextTile(n); n >= tile_begin; n = NextTile(n)) {
      if constexpr (!T::kBits) Wait(storage.FullK(k.stage()), k.parity());
      AwaitTurn();
      IssueScores();
      IssueOutput(accumulate);
      accumulate = true;
      PassTurn();
      if constexpr (T::kBits) TakeBits();
      WgmmaWait<1>();
      HoldRegisters(scores);
      LeaveKeys(n);
      const bool risen = ScoresToWeights(work, n, rescale);
      HoldRegisters(scores);
      const uint32_t used = storage.EmptyV(v.stage());
      v.Step();
      // Also keeps the softmax above the next wait: the compiler would otherwise move that wait up
      // to the last branch.
      Wait(storage.FullV(v.stage()), v.parity());
      WgmmaWait<0>();
      HoldRegisters(output);
      HoldRegisters(weights);
      Release(used);
      PackWeights();
      if (risen) RescaleRows(rescale, output);
    }
    FinishOutput(accumulate);
  }

  // Products and softmax of a warpgroup alternate; one warpgroup at a time exponentiates. Not with
  // a mask of bits: it learns too late whether there is a next tile.
  __device__ __forceinline__ void AccumulateInTurns(const Sm90Work& work) {
    float rescale[2];
    int n = tile_end - 1;
    LeaveKeys(n);
    FinishScores(work, n, rescale);
    AwaitTurn();
    Exponentiate(n);
    PackWeights();
    PassTurn();
    Wait(storage.FullV(v.stage()), v.parity());
    bool accumulate = false;
    for (--n; n >= tile_begin; --n) {
      IssueOutput(accumulate);
      accumulate = true;
      Wait(storage.FullK(k.stage()), k.parity());
      IssueScores();
      const uint32_t used = storage.EmptyV(v.stage());
      v.Step();
      WgmmaWait<0>();
      HoldRegisters(scores);
      HoldRegisters(output);
      HoldRegisters(weights);
      Release(used);
      LeaveKeys(n);
      const bool risen = FinishScores(work, n, rescale);
      if (risen) RescaleRows(rescale, output);
      AwaitTurn();
      Exponentiate(n);
      PackWeights();
      PassTurn();
      Wait(storage.FullV(v.stage()), v.parity());
    }
    FinishOutput(accumulate);
  }

  __device__ __forceinline__ void Accumulate(const Sm90Work& work) {
    if constexpr (T::kOverlap == Overlap::kSoftmaxTurns) {
      AccumulateInTurns(work);
    } else {
      AccumulateUnderOutput(work);
    }
  }

  // ---- setup ----------------------------------------------------------------------------------

  __device__ __forceinline__ void SetUp(const Sm90Work& work) {
    const int row_begin = work.row_begin + 64 * group;
    row = row_begin + 16 * (threadIdx.x / 32 % 4) + lane / 4;
    if constexpr (T::kCapInRegister) cap_factor = work.cap_factor;
    full_begin = work.window.Begin(row_begin + 63);
    full_end = work.window.End(row_begin);
    const int end = row_begin < work.q_len ? work.window.End(row_begin + 63) : 0;
    tile_end = min((end + T::kKeys - 1) / T::kKeys, work.tile_end);
    tile_end = ::max(tile_end, work.tile_begin + 1);
    tile_begin = ::max(work.window.Begin(row_begin) / T::kKeys, work.tile_begin);
    tile_begin = min(tile_begin, tile_end - 1);
    rows.Reset(work.to_log2);
    if constexpr (T::kBits) {
      tile_begin = work.tile_begin;
      tile_end = work.tile_end;  // the entries say which of them to visit
    }
    if constexpr (T::kDropout) {
      dropout = DropoutLane::Of(*work.attention, work.o_batch, work.o_head, row, lane);
    }
  }

  // ---- store ----------------------------------------------------------------------------------

  // The final state of row `r`.
  __device__ __forceinline__ RowEnd EndRow(const Sm90Work& work, int r) const {
    RowEnd end;
    if (rows.base[r] != kNoBase) end.state.max = rows.base[r] * kLn2;
    end.state.sum = QuadSum(rows.sum[r]);
    end.largest = LargestOfRow<kOutputs / 4>([&](int j) { return output + 4 * j; }, r);
    end.marked =
        rows.base[r] == kMarkedBase || (T::kBias && rows.base[r] == kLowBase) || IsMarked(general);
    end.counts = row + 8 * r < work.q_len && rows.base[r] != kNoBase;
    return end;
  }

  // Adds the sink, normalises, writes LSE. Rows without keys and padding get zeros.
  __device__ __forceinline__ void FinishRow(const Sm90Work& work, int r, const RowEnd& end) {
    const int mine = row + 8 * r;
    SoftmaxState<float> softmax = end.state;
    float factor = end.unit;
    if (work.has_sink) factor *= AddSink(softmax, work.sink);
    factor *= softmax.sum == 0.0f ? 0.0f : __fdividef(1.0f, softmax.sum);
    factor = KeepFinite<kBfloat16>(factor, end.largest);
    if constexpr (T::kDropout) factor *= DropoutScale(work.attention->problem.dropout);
    const bool padding = mine >= work.q_len;
    if (work.lse != nullptr && lane % 4 == 0 && mine < work.q_rows) {
      work.lse[mine] = padding ? NegativeInfinity() : LogSumExp(softmax);
    }
#pragma unroll
    for (int j = 0; j < kOutputs / 4; ++j) {
      output[4 * j + 2 * r] *= factor;
      output[4 * j + 2 * r + 1] *= factor;
    }
    // Weights of 0 times hidden values may be NaN, and without keys the output is undefined.
    if (padding || rows.base[r] == kNoBase) {
#pragma unroll
      for (int j = 0; j < kOutputs / 4; ++j) {
        output[4 * j + 2 * r] = output[4 * j + 2 * r + 1] = 0.0f;
      }
    }
  }

  // Stores by the copy engine, through the warpgroup's part of Q's stage. No thread waits for it.
  __device__ __forceinline__ void StoreBoxes(const Sm90Work& work, int stage) {
    // Products read Q for the whole warpgroup, and a warp has only waited for its own part of them.
    if constexpr (!T::kQueryInRegisters) SyncNamed(kGroupBarrier + group, 128);
    constexpr int kChunks = T::kColsV / 8;  // 16-byte chunks per row
    const uint32_t rows = storage.Q(stage) + group * 64 * 2 * T::kColsV;
    const int mine = 16 * (threadIdx.x / 32 % 4) + lane % 16;
    const int swizzle = kChunks == 8 ? mine % 8 : mine / 2 % 4;
#pragma unroll
    for (int block = 0; block < kOutputs / 4; block += 2) {
      const uint32_t x[4] = {
          OutputPair<kBfloat16>(output, block, 0), OutputPair<kBfloat16>(output, block, 1),
          OutputPair<kBfloat16>(output, block + 1, 0), OutputPair<kBfloat16>(output, block + 1, 1)};
      const int chunk = (block + lane / 16) % kChunks ^ swizzle;
      StoreMatrices(rows + block / kChunks * T::kBoxBytesQ + mine * 2 * T::kColsV + 16 * chunk, x);
    }
    FenceAsyncProxy();
    SyncNamed(kGroupBarrier + group, 128);
    if (threadIdx.x % 128 != 0) return;
    if (work.new_maps) AcquireTensorMap(&work.maps->o);
#pragma unroll
    for (int n = 0; n < T::kBoxesV; ++n) {
      StoreBox(&work.maps->o, rows + n * T::kBoxBytesQ, n * T::kColsV, work.row_begin + 64 * group,
               work.o_head, work.o_batch);
    }
    CommitStores();
  }

  __device__ __forceinline__ void Store(const Sm90Work& work, int stage) {
    RowEnd ends[2] = {EndRow(work, 0), EndRow(work, 1)};
    // Recompute the warp's first row index: this saves a register in the loop over keys.
    using Element = std::conditional_t<kBfloat16, __nv_bfloat16, __half>;
    RedoRows<Element, kOutputs / 4, T::kBits || T::kBias || T::kGeneral,
             !T::kDropout && !T::kBits && !T::kBias, T::kDropout>(
        *work.attention, work.o_batch, work.o_head, work.row_begin + 16 * (ThreadIndex() / 32 - 4),
        [&](int j) { return output + 4 * j; }, ends);
    FinishRow(work, 0, ends[0]);
    FinishRow(work, 1, ends[1]);
    if (T::kStoreThroughQ && work.maps->writes_o) {
      StoreBoxes(work, stage);
      return;
    }
    // LeaveStored arrives for all warps.
    if constexpr (T::kStoreThroughQ) SyncNamed(kGroupBarrier + group, 128);
    if (T::kGeneral && work.attention->problem.o_float32) {
      StoreFloats(work, row, lane, output);
    } else if (work.vectors) {
      StoreVectors<kBfloat16>(work, row, lane, output);
    } else {
      StoreElements<kBfloat16>(work, row, lane, output);
    }
  }

  // If there are no keys, the first product runs on whatever is in shared memory and is discarded.
  // Issued under a branch, it would make the compiler serialise all other wgmma.
  __device__ __forceinline__ void Run() {
    if (T::kTurns && group == T::kConsumers - 1) PassTurn();  // warpgroup 0 goes first
    const auto& state = *reinterpret_cast<const Sm90State<T>*>(shared + T::kOffsetState);
    int last_stage = -1;
    for (int turn = 0;; turn = (turn + 1) % Sm90State<T>::kSlots) {
      static_assert(!T::kScarce || T::kStagesQ == Sm90State<T>::kSlots);
      const int slot = T::kScarce ? q.stage() : turn;  // equal
      const Sm90Work& work = state.work[slot];
      Wait(storage.FullQ(q.stage()), q.parity());
      if (work.end) break;
      bool any = work.tile_begin < work.tile_end;
      SetUp(work);
      if constexpr (T::kGeneral) general.LoadSlope(work);
      Skip(work.tile_end - tile_end);
      LoadQuery();
      if constexpr (T::kBits) {
        any = TakeEntry();
      } else {
        if (any) Wait(storage.FullK(k.stage()), k.parity());
      }
      IssueScores();
      if constexpr (T::kBits) TakeBits();
      WgmmaWait<0>();
      HoldRegisters(scores);
      if (T::kStoreThroughQ && last_stage >= 0) LeaveStored(last_stage);
      if constexpr (T::kGeneral) general.ScaleSlope(work);
      if (!any && !T::kBits) LeaveQuery();
      if (any) {
        Accumulate(work);
        Skip(tile_begin - work.tile_begin);
      }
      Store(work, q.stage());
      __syncwarp();
      Release(storage.EmptyWork(slot));
      last_stage = q.stage();
      q.Step();
    }
    // The stores must read shared memory before it goes, and complete before the kernel ends.
    if constexpr (T::kStoreThroughQ) {
      if (threadIdx.x % 128 == 0) WaitStores();
    }
  }
};

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm80: FlashAttention with the Tensor Core instructions of Ampere (mma.sync, ldmatrix,
// cp.async), fp16 and bf16, accumulated in fp32. Runs on Ampere and later.
//
// A block computes one tile of query rows of one head at a time. Tiles of K and V pass through
// shared memory from the last key to the first (under a causal mask the tiles that need masking
// come first), in two stages: one barrier per tile, after which the previous tile's stage is
// refilled. Where shared memory is short there is one stage, K and V alternate, and there is a
// second barrier. Scores become weights in the registers from which the second product reads them.
// Device code, instantiated by the .cu files beside it.

#pragma once

#include "kernels/cuda/ragged/tile_queue.cuh"
#include "kernels/cuda/sm80/non_finite.cuh"
#include "kernels/cuda/sm80/setup.cuh"
#include "kernels/cuda/sm80/softmax.cuh"
#include "kernels/cuda/sm80/store.cuh"

namespace attend::cuda::sm80 {

// Per-thread constants of the loop over key tiles.
template <class T>
struct Place {
  uint32_t shared;                                    // the block's shared memory
  uint32_t query;                                     // the warp's rows of Q
  BlockOffsets<T::kDim> offsets{Second::kRows};       // within a tile of Q or V
  BlockOffsets<T::kDim> offsets_k{Second::kColumns};  // within a tile of K
};

// The part of Q that is kept in registers.
template <class T>
using QueryFragments = uint32_t[T::kSlices][T::kQuerySteps == 0 ? 1 : T::kQuerySteps][4];

// ---- edges --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ bool IsEdge(const BlockWork& work, int key) {
  return key < work.full_begin || key + T::kKeys > work.full_end;
}

// Whether some row may not see some key of the tile, so that NaN and Inf in V need care.
template <class T, bool kGeneral>
__device__ __forceinline__ bool MayHide(const BlockWork& work, int key) {
  return IsEdge<T>(work, key) || (kGeneral && work.has_bias);
}

// ---- load ---------------------------------------------------------------------------------------

// Multiplies the warp's rows of Q by BlockWork's query_sign.
template <class T, class Element>
__device__ __forceinline__ void GiveSign(char* query, float sign) {
  auto* pairs = reinterpret_cast<uint32_t*>(query);
#pragma unroll 1
  for (int n = threadIdx.x % 32; n < T::kWarpRows * T::Row::kBytes / 4; n += 32) {
    const float2 pair = Unpack<Element>(pairs[n]);
    pairs[n] = Pack<Element>(pair.x * sign, pair.y * sign);
  }
  __syncwarp();
}

// The stage of the tile that starts at `key`; adjacent tiles differ.
template <class T>
__device__ __forceinline__ int StageOf(int key) {
  return key / T::kKeys % T::kStages * T::kTileBytes;
}
template <class T>
__device__ __forceinline__ uint32_t StageOfK(const Place<T>& place, int key) {
  return place.shared + T::kOffsetK + StageOf<T>(key);
}
template <class T>
__device__ __forceinline__ uint32_t StageOfV(const Place<T>& place, int key) {
  return place.shared + T::kOffsetV + StageOf<T>(key);
}

template <class T>
__device__ __forceinline__ void LoadKeys(const BlockWork& work, const Place<T>& place, int key) {
  if constexpr (T::kPaged) {
    LoadPages<T>(StageOfK(place, key), work.k, work.pages, work.pages.stride_k, key, work.k_len);
  } else {
    LoadRows<T, T::kKeys>(StageOfK(place, key), work.k, key, work.k_len);
  }
}
template <class T>
__device__ __forceinline__ void LoadValues(const BlockWork& work, const Place<T>& place, int key) {
  if constexpr (T::kPaged) {
    LoadPages<T>(StageOfV(place, key), work.v, work.pages, work.pages.stride_v, key, work.k_len);
  } else {
    LoadRows<T, T::kKeys>(StageOfV(place, key), work.v, key, work.k_len);
  }
}

// ---- score --------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void LoadQuery(const Place<T>& place, QueryFragments<T>& query) {
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int k = 0; k < T::kQuerySteps; ++k) {
      LoadMatrix(place.query + place.offsets.At(m, k), query[m][k]);
    }
  }
}

// Adds the scores' part from 16 columns; the first part initialises them.
template <class T, class Element>
__device__ __forceinline__ void ScoreStep(const Place<T>& place, const QueryFragments<T>& query,
                                          uint32_t keys, int k, Scores<T>& s) {
  uint32_t q[T::kSlices][4];
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
    if (k < T::kQuerySteps) {  // known at compile time
#pragma unroll
      for (int e = 0; e < 4; ++e) q[m][e] = query[m][k][e];
    } else {
      LoadMatrix(place.query + place.offsets.At(m, k), q[m]);
    }
  }
#pragma unroll
  for (int n = 0; n < T::kKeyBlocks; n += 2) {
    uint32_t b[4];
    LoadMatrix(keys + place.offsets_k.At(n / 2, k), b);
#pragma unroll
    for (int m = 0; m < T::kSlices; ++m) {
      if (k == 0) {
        Multiply<Element>(s[m][n], q[m], b[0], b[1]);
        Multiply<Element>(s[m][n + 1], q[m], b[2], b[3]);
      } else {
        MultiplyAdd<Element>(s[m][n], q[m], b[0], b[1]);
        MultiplyAdd<Element>(s[m][n + 1], q[m], b[2], b[3]);
      }
    }
  }
}

template <class T, class Element>
__device__ __forceinline__ void Score(const Place<T>& place, const QueryFragments<T>& query,
                                      uint32_t keys, Scores<T>& s) {
#pragma unroll
  for (int k = 0; k < T::kDimSteps; ++k) ScoreStep<T, Element>(place, query, keys, k, s);
}

template <class T, bool kGeneral>
__device__ __forceinline__ void FinishScores(const BlockWork& work, int key, Scores<T>& s) {
  if constexpr (kGeneral) ApplyTerms<T>(*work.attention, work, key, s);
  if (IsEdge<T>(work, key) && !WarpSeesAll<T>(work, key)) HideKeys<T>(work, key, s);
}

// ---- rescale and accumulate ---------------------------------------------------------------------

// A tile's weights, laid out for the second product: [slice][eight keys][half].
template <class T>
using Weights = uint32_t[T::kSlices][T::kKeyBlocks][2];

// Removes the dropped weights among the 16 keys of step k.
template <class T>
__device__ __forceinline__ void DropWeights(const DropoutLane& dropout, int key, int k,
                                            Weights<T>& p) {
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
    const DropoutBits bits = dropout.Draw<false>(m, key + 16 * k);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      p[m][2 * k + n % 2][n / 2] &= KeptHalves(bits.words[n], dropout.kept);
    }
  }
}

// Turns the scores of the 16 keys of step k into weights, over all slices. `dropout`: if T has it.
template <class T, class Element>
__device__ __forceinline__ void WeighStep(float to_log2, const DropoutLane& dropout, int key, int k,
                                          Scores<T>& s, Weights<T>& p, RowState<T>& state) {
#pragma unroll
  for (int n = 2 * k; n < 2 * k + 2; ++n) {
#pragma unroll
    for (int m = 0; m < T::kSlices; ++m) {
      WeighBlock<T, Element>(to_log2, m, s[m][n], p[m][n], state);
    }
  }
  if constexpr (T::kDropout) DropWeights<T>(dropout, key, k, p);
}

// Adds the 16 keys' part of P V.
template <class T, class Element>
__device__ __forceinline__ void AccumulateStep(const Place<T>& place, uint32_t values, int k,
                                               const Weights<T>& p, RowState<T>& state) {
  uint32_t a[T::kSlices][4];
#pragma unroll
  for (int m = 0; m < T::kSlices; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) a[m][e] = p[m][2 * k + e / 2][e % 2];
  }
#pragma unroll
  for (int j = 0; j < T::kDimSteps; ++j) {
    uint32_t b[4];
    LoadMatrixTransposed(values + place.offsets.At(k, j), b);
#pragma unroll
    for (int m = 0; m < T::kSlices; ++m) {
      MultiplyAdd<Element>(state.output[m][2 * j], a[m], b[0], b[1]);
      MultiplyAdd<Element>(state.output[m][2 * j + 1], a[m], b[2], b[3]);
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

// Starts the copies for the first key tile: Q and K, then V as a second group.
template <class T>
__device__ __forceinline__ void LoadFirst(const BlockWork& work, const Place<T>& place, int key) {
  LoadRows<T, T::kRows>(place.shared, work.q, work.row_begin, work.q_len);
  LoadKeys<T>(work, place, key);
  CommitCopies();
  if constexpr (T::kStages == 2) {
    LoadValues<T>(work, place, key);
    CommitCopies();
  }
}

// Starts the copies of the next key tile.
template <class T>
__device__ __forceinline__ void LoadNext(const BlockWork& work, const Place<T>& place, int key) {
  const int next = key - T::kKeys;
  if (next < work.key_begin) return;
  LoadKeys<T>(work, place, next);
  if constexpr (T::kStages == 2) {
    LoadValues<T>(work, place, next);
  }
  CommitCopies();
}

// Waits for V, and checks it for NaN and Inf where they matter.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void WaitForValues(const char* values, int key, BlockWork& work) {
  WaitCopyGroups<0>();
  if (MayHide<T, kGeneral>(work, key)) NoteNonFinite<T, Element>(values, key, work);
  __syncthreads();
}

// One key tile. With one stage V is loaded during the scores, then the next K in this K's place.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ void Step(BlockWork& work, const Place<T>& place,
                                     const QueryFragments<T>& query, char* shared, int key,
                                     RowState<T>& state) {
  char* values = shared + T::kOffsetV + StageOf<T>(key);
  if constexpr (T::kStages == 2) {
    WaitForValues<T, Element, kGeneral>(values, key, work);  // the other stage is free
  } else {
    WaitCopyGroups<0>();
    __syncthreads();  // K has arrived; V's stage is free
    LoadValues<T>(work, place, key);
    CommitCopies();
  }
  if constexpr (T::kCopyFirst) LoadNext<T>(work, place, key);
  if (IsEdge<T>(work, key) && !WarpSees<T>(work, key)) {
    if constexpr (T::kStages == 1) WaitForValues<T, Element, kGeneral>(values, key, work);
    if constexpr (!T::kCopyFirst) LoadNext<T>(work, place, key);
    if (SpoiledKey<T>(work, key) == key) {
      TakeOutNonFinite<T, Element>(values, [] {});  // needs all warps
    }
    return;
  }
  Scores<T> s;
  Score<T, Element>(place, query, StageOfK(place, key), s);
  if constexpr (T::kStages == 1) WaitForValues<T, Element, kGeneral>(values, key, work);
  if constexpr (!T::kCopyFirst) LoadNext<T>(work, place, key);
  FinishScores<T, kGeneral>(work, key, s);
  RaiseBases<T, kGeneral>(work.to_log2, s, state);
  if (MayHide<T, kGeneral>(work, key) && SpoiledKey<T>(work, key) == key) {
    TakeOutNonFinite<T, Element>(
        values, [&] { AddNonFinite<T, Element>(values, work.v.dim, work.to_log2, s, state); });
  }
  DropoutLane dropout;
  if constexpr (T::kDropout) {
    dropout =
        DropoutLane::Of(*work.attention, work.b, work.h, RowOf<T>(work, 0), ThreadIndex() % 32);
  }
  Weights<T> p;
  WeighStep<T, Element>(work.to_log2, dropout, key, 0, s, p, state);
#pragma unroll
  for (int k = 0; k < T::kKeys / 16; ++k) {
    // The exponentials of the next 16 keys overlap with the products of these.
    if (k + 1 < T::kKeys / 16) {
      WeighStep<T, Element>(work.to_log2, dropout, key, k + 1, s, p, state);
    }
    AccumulateStep<T, Element>(place, StageOfV(place, key), k, p, state);
  }
}

template <class T>
__device__ __forceinline__ void Start(RowState<T>& state) {
#pragma unroll
  for (int r = 0; r < T::kThreadRows; ++r) {
    state.base[r] = kNoBase;
    state.sum[r] = 0.0f;
#pragma unroll
    for (int j = 0; j < T::kDim / 8; ++j) {
      state.output[r / 2][j][r % 2 * 2] = state.output[r / 2][j][r % 2 * 2 + 1] = 0.0f;
    }
  }
}

// The warp's rows of Q. Recomputed after the loop instead of occupying a register in it.
template <class T>
__device__ __forceinline__ char* WarpQuery(const BlockWork& work, char* shared) {
  return shared + WarpPlace(work) * T::kWarpRows * T::Row::kBytes;
}

// Computes `work` and sets up `following`, tile number `next`. Returns the number of the tile after
// that, to thread 0 only and only if there is a following one.
template <class T, class Element, bool kGeneral>
__device__ __forceinline__ int ComputeTile(const RaggedParams& params, int next, BlockWork& work,
                                           char* shared, BlockWork& following) {
  const Place<T> place{SharedAddress(shared), SharedAddress(WarpQuery<T>(work, shared))};
  int key = (work.key_end - 1) / T::kKeys * T::kKeys;
  const bool sees_keys = work.key_begin < work.key_end;
  if (sees_keys) LoadFirst<T>(work, place, key);
  // Overlaps with the copies.
  if (threadIdx.x == 0) SetUp<T, kGeneral>(params, next, following);
  RowState<T> state;
  Start<T>(state);
  if (sees_keys) {
    WaitCopyGroups<T::kStages - 1>();
    __syncthreads();
    if (work.query_sign != 1.0f) {
      GiveSign<T, Element>(WarpQuery<T>(work, shared), work.query_sign);
    }
    QueryFragments<T> query;
    LoadQuery<T>(place, query);
#pragma unroll 1
    for (; key >= work.key_begin; key -= T::kKeys) {
      Step<T, Element, kGeneral>(work, place, query, shared, key, state);
    }
  }
  // The claim's latency overlaps with storing O.
  int claimed = 0;
  if (threadIdx.x == 0 && following.attention != nullptr) {
    claimed = ClaimTileOf(params, TileCount(params));
  }
  StoreOutput<T, Element, kGeneral>(work, WarpQuery<T>(work, shared), state);
  return claimed;
}

template <class T, class Element, bool kGeneral>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FlashSm80Kernel(const __grid_constant__ RaggedParams params) {
  extern __shared__ __align__(128) char shared[];
  __shared__ BlockWork work[2];  // one is computed, the other set up
  int next = 0;                  // used by thread 0
  if (threadIdx.x == 0) {
    next = ClaimTileOf(params, TileCount(params));
    SetUp<T, kGeneral>(params, blockIdx.x, work[0]);
  }
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; work[turn].attention != nullptr; turn ^= 1) {
    next = ComputeTile<T, Element, kGeneral>(params, next, work[turn], shared, work[turn ^ 1]);
    __syncthreads();  // shared memory is free
    const BlockWork* done = &work[turn];
#if __CUDA_ARCH__ < 900
    asm volatile("" : "+l"(done));  // opaque: the tile has no registers for what derives from it
#endif
    if (done->asked != 0) RepairTile<T, Element, kGeneral>(*done);
  }
}

}  // namespace attend::cuda::sm80

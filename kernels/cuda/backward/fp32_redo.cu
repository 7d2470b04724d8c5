// SPDX-License-Identifier: Apache-2.0
//
// Computes again the tiles of gradients that kernels of 16-bit products left with NaN or Inf: finds
// them, has a block try each alone, and shares those that it cannot finish among the blocks of a
// cluster (fp32_repair.cuh). A flag says whether there may be any.

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/common_parts.cuh"
#include "kernels/cuda/backward/fp32_repair.cuh"

namespace attend::cuda {
namespace {

// Words behind the flags (RedoBytes).
template <class T>
struct RedoLists {
  uint32_t* heads;  // per query head: whether one of its tiles is listed
  uint32_t* found;  // numbers of the tiles with NaN or Inf
  uint32_t* left;   // numbers of those that no block could finish alone

  explicit __device__ __forceinline__ RedoLists(const BackwardPass& pass)
      : heads(reinterpret_cast<uint32_t*>(pass.flags) + kTermFlagBytes / 4),
        found(heads + pass.attention.problem.batch * pass.attention.problem.heads_q),
        left(found + T::kParts * RedoTiles(pass.attention.problem)) {}
};

// The block takes the next unit of work.
__device__ __forceinline__ uint32_t Take(uint32_t* taken) {
  __shared__ uint32_t unit;
  __syncthreads();  // the previous unit is done
  if (threadIdx.x == 0) unit = atomicAdd(taken, 1);
  __syncthreads();
  return unit;
}
// Tells that the unit is done.
__device__ __forceinline__ void Finish(uint32_t* done) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(done, 1);
}
// Waits for all units. Deadlock-free: blocks that run have taken them.
__device__ __forceinline__ void WaitFor(uint32_t* done, uint32_t count) {
  if (threadIdx.x == 0) {
    while (atomicAdd(done, 0) < count) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

// ---- looking ------------------------------------------------------------------------------------

// Whether one of eight 16-bit elements is NaN or Inf.
__device__ __forceinline__ bool IsAnyNonFinite(DType dtype, const uint4& x) {
  const uint32_t low = dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
  bool any = false;
#pragma unroll
  for (const uint32_t pair : {x.x, x.y, x.z, x.w}) {
    any = any || (pair & low) == low || (pair >> 16 & low) == low;
  }
  return any;
}

// Whether one of the tile's elements is. A warp.
template <class T>
__device__ __forceinline__ bool IsAnyNonFinite(const BackwardPass& pass, const TilePlace& tile) {
  const Problem& p = pass.attention.problem;
  const Gradients& g = pass.gradients;
  const bool queries = tile.of == TileOf::kQueries;
  const TensorView& to = queries ? g.d_q : tile.of == TileOf::kKeys ? g.d_k : g.d_v;
  if (to.data == nullptr) return false;
  const Sequence s = SequenceOf(pass.attention, tile.b);
  const auto rows = static_cast<int>(
      min((queries ? s.q_len : s.k_len) - tile.row, int64_t{queries ? T::kRows : T::kKeys}));
  const auto dim = static_cast<int>(tile.of == TileOf::kValues ? p.dim_v : p.dim);
  const int64_t base = tile.b * to.stride_b + tile.h * to.stride_h +
                       ((queries ? s.q_row : s.k_row) + tile.row) * to.stride_l;
  const bool whole = reinterpret_cast<uint64_t>(to.data) % 16 == 0 && dim % 8 == 0 &&
                     base % 8 == 0 && to.stride_l % 8 == 0;
  const int chunks = (dim + 7) / 8;
  const int count = rows * chunks;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  bool any = false;
  if (whole) {
    const auto* const data = static_cast<const uint16_t*>(to.data) + base;
#pragma unroll 8
    for (int n = lane; n < count; n += 32) {
      const uint16_t* const from = data + n / chunks * to.stride_l + n % chunks * 8;
      any |= IsAnyNonFinite(p.dtype, *reinterpret_cast<const uint4*>(from));
    }
  } else {
    for (int n = lane; n < count; n += 32) {
      const int col = n % chunks * 8;
      const int64_t at = base + n / chunks * to.stride_l + col;
      any |= IsAnyNonFinite(p.dtype, LoadEight(to.data, at, dim - col, false));
    }
  }
  return __any_sync(0xffffffffu, any);
}

// Lists the tiles with such elements. In each unit of work a warp looks at two.
template <class T>
__device__ __forceinline__ void Look(const BackwardPass& pass) {
  constexpr int kUnit = T::kThreads / 32 * 2;
  PassFlags& flags = *pass.flags;
  const RedoLists<T> lists(pass);
  const Problem& p = pass.attention.problem;
  const uint32_t count = TilePlace::Count<T>(pass);
  const uint32_t units = (count + kUnit - 1) / kUnit;
  for (uint32_t unit = Take(&flags.to_look); unit < units; unit = Take(&flags.to_look)) {
    for (uint32_t n = unit * kUnit + threadIdx.x / 32; n < min(count, (unit + 1) * kUnit);
         n += T::kThreads / 32) {
      const TilePlace tile = TilePlace::At<T>(p, n);
      if (!IsAnyNonFinite<T>(pass, tile) || threadIdx.x % 32 != 0) continue;
      lists.found[atomicAdd(&flags.found, 1)] = n;
      const auto group = tile.of == TileOf::kQueries ? 1 : static_cast<int>(p.group());
      for (int h = 0; h < group; ++h) lists.heads[tile.b * p.heads_q + tile.h * group + h] = 1;
    }
    Finish(&flags.looked);
  }
  WaitFor(&flags.looked, units);
}

// ---- computing ----------------------------------------------------------------------------------

// Measures the rows of heads with tiles to compute.
template <class T>
__device__ __forceinline__ void MeasureHeads(const BackwardPass& pass) {
  PassFlags& flags = *pass.flags;
  const RedoLists<T> lists(pass);
  const Problem& p = pass.attention.problem;
  const auto tiles = static_cast<uint32_t>((p.len_q + T::kRows - 1) / T::kRows);
  const auto count = static_cast<uint32_t>(Blocks<T, Of::kMeasure>(pass));
  for (uint32_t unit = Take(&flags.to_measure); unit < count; unit = Take(&flags.to_measure)) {
    if (lists.heads[unit / tiles] != 0) MeasureRows<T>(pass, unit);
    Finish(&flags.measured);
  }
  WaitFor(&flags.measured, count);
}

template <class T>
__device__ __forceinline__ bool Compute(const BackwardPass& pass, uint32_t number, bool alone) {
  extern __shared__ float4 storage[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(storage);
  const TilePlace tile = TilePlace::At<T>(pass.attention.problem, number);
  if (tile.of == TileOf::kQueries)
    return Compute(QueryRepair<T>(shared, pass, tile), alone, storage);
  if (tile.of == TileOf::kKeys)
    return Compute(KeyRepair<T, true>(shared, pass, tile), alone, storage);
  return Compute(KeyRepair<T, false>(shared, pass, tile), alone, storage);
}

template <class T>
__device__ __forceinline__ void Redo(const BackwardPass& pass) {
  PassFlags& flags = *pass.flags;
  const RedoLists<T> lists(pass);
  Look<T>(pass);
  if (flags.measure != 0) MeasureHeads<T>(pass);
  const uint32_t clusters = gridDim.x / ClusterBlocks();
  uint32_t mine = blockIdx.x / ClusterBlocks();  // of the tiles left
#pragma unroll 1
  for (int shared = 0; shared < 2; ++shared) {  // one loop, as its body is large
    const uint32_t count = shared ? flags.left : flags.found;
    for (;;) {
      const uint32_t n = shared ? mine : Take(&flags.taken);
      if (n >= count) break;
      mine += shared ? clusters : 0;
      const uint32_t tile = shared ? lists.left[n] : lists.found[n];
      const bool done = Compute<T>(pass, tile, !shared);
      if (shared) continue;
      if (!done && threadIdx.x == 0) lists.left[atomicAdd(&flags.left, 1)] = tile;
      Finish(&flags.seen);
    }
    if (!shared) WaitFor(&flags.seen, count);
  }
}

template <class T, int kCount>
__global__ void __launch_bounds__(T::kThreads, 1)
    Fp32Redo(const __grid_constant__ LaunchList<PassItem, kCount> list) {
#if __CUDA_ARCH__ < 900
  if constexpr (T::kNeedsHopper) return;
#endif
  // Opaque, so that values derived from the pass do not occupy registers.
  int n;
  asm volatile("mov.u32 %0, 0;" : "=r"(n));
  for (; n < kCount; ++n) {
    const BackwardPass& pass = list.items[n].pass;
    if (pass.first_block != kNoBlock && pass.flags->redo != 0) Redo<T>(pass);
  }
}

// Usually there is nothing to redo: enough blocks to fill a GPU, as more would only take longer to
// find that out.
constexpr int kRedoBlocks = 128;
constexpr int kRedoCluster = 8;   // blocks
constexpr int kClusterMajor = 9;  // compute capability

template <class T>
cudaError_t LaunchRedo(Passes passes, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) {
    items.push_back({{pass}, std::min<int64_t>(RedoTiles(pass.attention.problem), kRedoBlocks)});
  }
  void (*single)(LaunchList<PassItem, 1>) = nullptr;
  if constexpr (T::kParts == 1) single = Fp32Redo<T, 1>;
  return LaunchItems(single, Fp32Redo<T, kItemsMax>, std::move(items),
                     {.threads = T::kThreads,
                      .shared_bytes = static_cast<int>(sizeof(typename T::Shared)),
                      .blocks_max = kRedoBlocks,
                      .cluster = major >= kClusterMajor ? kRedoCluster : 1},
                     stream);
}

}  // namespace

cudaError_t LaunchFp32Repairs(Passes passes, cudaStream_t stream) {
  return WithFp32Tile(passes,
                      [&](auto tile) { return LaunchRedo<decltype(tile)>(passes, stream); });
}

}  // namespace attend::cuda

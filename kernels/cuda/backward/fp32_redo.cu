// SPDX-License-Identifier: Apache-2.0
//
// Recomputes, on CUDA cores, the elements that kernels of 16-bit products left non-finite. Finite
// elements are kept, and a tile without others only costs reading it.

#include <utility>
#include <vector>

#include "kernels/cuda/backward/fp32_gradients.cuh"

namespace attend::cuda {
namespace {

template <int kCount>
__device__ __forceinline__ bool IsAnyWanted(const LaunchList<PassItem, kCount>& list) {
  bool wanted = false;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const BackwardPass& pass = list.items[n].pass;
    wanted = wanted || (pass.first_block != kNoBlock && pass.flags->redo != 0);
  }
  return wanted;
}

// One unit of a pass's work: first the tiles whose rows are measured, then those of keys, twice,
// and those of rows; the latter two wait for the former.
template <class T>
__device__ __forceinline__ void RedoUnit(const BackwardPass& pass, uint32_t unit) {
  const auto measures = static_cast<uint32_t>(Blocks<T, Of::kMeasure>(pass));
  const auto keys = static_cast<uint32_t>(Blocks<T, Of::kKeys>(pass));
  PassFlags& flags = *pass.flags;
  if (unit < measures) {
    if (flags.measure == 0) return;
    MeasureRows<T>(pass, unit);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&flags.measured, 1);
    return;
  }
  if (flags.measure != 0 && threadIdx.x == 0) {
    while (atomicAdd(&flags.measured, 0) < measures) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
  unit -= measures;
  if (unit < keys) {
    KeyGradients<T, Computes::kRepairsOfKeys>(pass, unit);
  } else if (unit < 2 * keys) {
    KeyGradients<T, Computes::kRepairsOfValues>(pass, unit - keys);
  } else {
    QueryGradients<T, Computes::kRepairsOfQueries>(pass, unit - 2 * keys);
  }
}

// Deadlock-free: blocks take units in order, so a unit only waits for units that running blocks
// have already taken.
template <class T, int kCount>
__global__ void __launch_bounds__(T::kThreads, 1)
    Fp32Redo(const __grid_constant__ LaunchList<PassItem, kCount> list) {
  if (!IsAnyWanted(list)) return;
  __shared__ uint32_t unit;
  for (;;) {
    __syncthreads();  // the previous unit is done
    if (threadIdx.x == 0) unit = atomicAdd(&list.items[0].pass.flags->taken, 1);
    __syncthreads();
    if (unit >= list.blocks) return;
    const BackwardPass& pass = list.Of(unit).pass;
    if (pass.flags->redo != 0) RedoUnit<T>(pass, unit - pass.first_block);
  }
}

// Usually there is nothing to redo: enough blocks to fill a GPU, as more would only take longer to
// find that out.
constexpr int64_t kRedoBlocks = 132;

template <class T>
cudaError_t LaunchRedo(Passes passes, cudaStream_t stream) {
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) {
    items.push_back({{pass},
                     Blocks<T, Of::kMeasure>(pass) + 2 * Blocks<T, Of::kKeys>(pass) +
                         Blocks<T, Of::kQueries>(pass)});
  }
  return LaunchItems(Fp32Redo<T, 1>, Fp32Redo<T, kItemsMax>, std::move(items),
                     {T::kThreads, static_cast<int>(sizeof(typename T::Shared)), kRedoBlocks},
                     stream);
}

}  // namespace

cudaError_t LaunchFp32Repairs(Passes passes, cudaStream_t stream) {
  return WithFp32Tile(passes,
                      [&](auto tile) { return LaunchRedo<decltype(tile)>(passes, stream); });
}

}  // namespace attend::cuda

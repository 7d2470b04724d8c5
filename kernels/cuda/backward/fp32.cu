// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_fp32's backward pass: kernels and launches.

#include <utility>
#include <vector>

#include "kernels/cuda/backward/fp32_gradients.cuh"

namespace attend::cuda {
namespace {

template <class T, Of kOf, int kCount>
__global__ void __launch_bounds__(T::kThreads, 1)
    Fp32Gradients(const __grid_constant__ LaunchList<PassItem, kCount> list) {
#if __CUDA_ARCH__ < 900
  if constexpr (T::kNeedsHopper) return;
#endif
  const BackwardPass& pass = list.Of(blockIdx.x).pass;
  const uint32_t block = blockIdx.x - pass.first_block;
  if constexpr (kOf == Of::kMeasure) {
    if (HasMeasured(pass)) MeasureRows<T>(pass, block);
  }
  if constexpr (kOf == Of::kKeys) KeyGradients<T>(pass, block);
  if constexpr (kOf == Of::kQueries) QueryGradients<T>(pass, block);
  if constexpr (kOf == Of::kBias) BiasGradients<T>(pass, block);
}

template <class T, Of kOf>
cudaError_t Launch(Passes passes, cudaStream_t stream) {
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) items.push_back({{pass}, Blocks<T, kOf>(pass)});
  void (*single)(LaunchList<PassItem, 1>) = nullptr;
  if constexpr (T::kParts == 1) single = Fp32Gradients<T, kOf, 1>;
  return LaunchItems(single, Fp32Gradients<T, kOf, kItemsMax>, std::move(items),
                     {T::kThreads, static_cast<int>(sizeof(typename T::Shared))}, stream);
}

template <class T>
cudaError_t LaunchAll(Passes passes, cudaStream_t stream) {
  const Gradients& g = passes.front().gradients;
  cudaError_t error = Launch<T, Of::kMeasure>(passes, stream);
  if (error == cudaSuccess && g.d_sinks != nullptr) error = LaunchSinkGradients(passes, stream);
  if (error == cudaSuccess && (g.d_k.data != nullptr || g.d_v.data != nullptr)) {
    error = Launch<T, Of::kKeys>(passes, stream);
  }
  if (error == cudaSuccess && g.d_q.data != nullptr) {
    error = Launch<T, Of::kQueries>(passes, stream);
  }
  if (error == cudaSuccess && g.d_bias.data != nullptr) {
    error = Launch<T, Of::kBias>(passes, stream);
  }
  return error;
}

}  // namespace

cudaError_t LaunchFp32Gradients(Passes passes, cudaStream_t stream) {
  return WithFp32Tile(passes, [&](auto tile) { return LaunchAll<decltype(tile)>(passes, stream); });
}

}  // namespace attend::cuda

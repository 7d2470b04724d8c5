// SPDX-License-Identifier: Apache-2.0
//
// cuda_flash_sm90: FlashAttention forward for Hopper. A block has one producer warpgroup, of which
// one warp drives the copy engine and one thread describes tiles ahead, and one to four consumer
// warpgroups of 64 query rows each; they synchronise by mbarriers. Blocks are persistent and claim
// tiles longest first (ragged.h). Device code, instantiated by bf16.cu and f16.cu.
//
// After "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (Shah et
// al., 2024).

#pragma once

#include "kernels/cuda/sm90/bias.cuh"
#include "kernels/cuda/sm90/consumer.cuh"
#include "kernels/cuda/sm90/mask_bits.cuh"
#include "kernels/cuda/sm90/producer.cuh"
#include "kernels/cuda/sm90/scheduler.cuh"

namespace attend::cuda {

template <class T>
__device__ __forceinline__ void InitBarriers(const Sm90SharedStorage<T>& at) {
  constexpr int kWarps = 4 * T::kConsumers;
  for (int n = 0; n < Sm90State<T>::kSlots; ++n) {
    InitBarrier(at.FullWork(n), 1);
    InitBarrier(at.EmptyWork(n), kWarps + (T::kBits ? kSm90BitsWarps : 0) + (T::kBias ? 1 : 0));
  }
  for (int n = 0; n < T::kStagesQ; ++n) {
    InitBarrier(at.FullQ(n), 1);
    InitBarrier(at.EmptyQ(n), T::kStoreThroughQ ? T::kConsumers : kWarps);
  }
  for (int n = 0; n < T::kStages; ++n) {
    InitBarrier(at.FullK(n), T::kBits ? 2 : 1);
    InitBarrier(at.EmptyK(n), kWarps);
    InitBarrier(at.FullV(n), 1);
    InitBarrier(at.EmptyV(n), kWarps);
  }
  InitBarrier(at.Tail(), 1);
  if constexpr (T::kBits) {
    for (int n = 0; n < kSm90Scans; ++n) {
      InitBarrier(at.FullScan(n), 1);
      InitBarrier(at.EmptyScan(n), 2);
    }
  }
  if constexpr (T::kBias) {
    for (int n = 0; n < Sm90BiasState<T>::kPlaces; ++n) {
      InitBarrier(at.FullBias(n), 1);
      InitBarrier(at.EmptyBias(n), kWarps / T::kBiasParts);
    }
  }
  FenceBarrierInit();
}

__device__ __forceinline__ void PrefetchMaps(const TensorMaps& maps) {
  PrefetchTensorMap(&maps.q);
  PrefetchTensorMap(&maps.k);
  PrefetchTensorMap(&maps.v);
  if (maps.writes_o) PrefetchTensorMap(&maps.o);
}

template <class T, bool kBfloat16>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    FlashSm90Kernel(const __grid_constant__ RaggedParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  // The swizzle pattern is relative to 1024-byte boundaries.
  char* shared = unaligned + (1024 - SharedAddress(unaligned) % 1024) % 1024;
  const Sm90SharedStorage<T> storage{SharedAddress(shared)};
  if (threadIdx.x == 0) InitBarriers(storage);
  if (threadIdx.x == 32) {
    AllowNextLaunch();
    if (params.attentions == nullptr) PrefetchMaps(params.single_maps);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  // Broadcast from lane 0, so that the compiler knows it to be warp-uniform.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ReleaseRegisters<T::kProducerRegisters>();
    if (warp == 0) {
      // Keys of a launch are paged in all attentions or in none: a loop for each case saves
      // registers.
      if (T::kReadsPages && params.single.problem.page_rows > 0) {
        Producer<T, true> producer{shared, storage, lane};
        producer.Run();
      } else {
        Producer<T, false> producer{shared, storage, lane};
        producer.Run();
      }
    } else if (warp == 1 && lane == 0) {
      auto& state = *reinterpret_cast<Sm90State<T>*>(shared + T::kOffsetState);
      Scheduler<T> scheduler{params, state, storage};
      scheduler.Run();
    } else if (T::kBits && warp == 2) {
      if constexpr (T::kBits) {
        BitScanner<T> scanner{shared, storage, lane};
        scanner.Run();
      }
    } else if (T::kBits && warp == 3) {
      if constexpr (T::kBits) {
        BitArranger<T> arranger{shared, storage, lane};
        arranger.Run();
      }
    } else if (T::kBias && warp == 2) {
      if constexpr (T::kBias) {
        BiasLoader<T> loader{shared, storage, lane};
        loader.Run();
      }
    }
  } else {
    TakeRegisters<T::kConsumerRegisters>();
    const int group = warp / 4 - 1;
    Consumer<T, kBfloat16> consumer{shared, storage, group, lane};
    consumer.Run();
  }
#endif
}

}  // namespace attend::cuda

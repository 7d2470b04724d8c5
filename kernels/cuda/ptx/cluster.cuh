// SPDX-License-Identifier: Apache-2.0
//
// Clusters of blocks, which read each other's shared memory. Below compute capability 9.0 each
// block is alone. Device code.

#pragma once

#include <cstdint>

namespace attend::cuda {

__device__ __forceinline__ uint32_t ClusterBlocks() {
  uint32_t count = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
  return count;
}
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Barrier of all threads of a cluster. What they wrote before is visible.
__device__ __forceinline__ void SyncCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// The address of `own`, in this block's shared memory, in that of the block of rank `rank`.
template <class T>
__device__ __forceinline__ T* PeerShared(T* own, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  T* peer;
  asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
  return peer;
#else
  return own;
#endif
}

}  // namespace attend::cuda

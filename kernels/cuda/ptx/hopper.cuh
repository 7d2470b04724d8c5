// SPDX-License-Identifier: Apache-2.0
//
// Hopper's asynchronous machinery other than wgmma: mbarriers, the copy engine (TMA), named
// barriers, register reallocation. Thin wrappers, one instruction each (PTX ISA 8.0 and later).
// Device code for sm_90a.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// ---- mbarriers ----------------------------------------------------------------------------------

// A barrier is 8 bytes of shared memory, identified by their address. A phase ends when `arrivals`
// threads have arrived and all announced bytes have been copied; its parity alternates from 0 on.
using Barrier = uint64_t;

__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Call after initialising barriers, before other threads (and TMA) use them.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` of copies too.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase with that parity. On a new barrier, phase parity 1 counts as
// ended.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ended;\n"
      "bra again;\n"
      "ended: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- named barriers -----------------------------------------------------------------------------

// `id` is 1 to 15 (0 is __syncthreads'); `threads` counts syncing and arriving threads.
__device__ __forceinline__ void SyncNamed(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveNamed(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- the copy engine ----------------------------------------------------------------------------

// L2 cache policy of a load (the encodings of createpolicy.fractional).
enum class CachePolicy : uint64_t {
  kEvictNormal = 0x1000000000000000,
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

// Loads the map's box at [b, h, row, col] to `shared`; its bytes count towards the barrier's phase.
// One thread. Elements outside the tensor arrive as zeros, and count.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, uint32_t shared, uint32_t barrier,
                                        int col, int row, int h, int b, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(col), "r"(row), "r"(h), "r"(b), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

// Stores a box from shared memory to [b, h, row, col] of the tensor; elements outside it are
// skipped. One thread, after all writers of the box have called FenceAsyncProxy and passed a
// barrier.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t shared, int col, int row,
                                         int h, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(col), "r"(row), "r"(h), "r"(b)
      : "memory");
}
__device__ __forceinline__ void CommitStores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Wait until the calling thread's stores have read shared memory; until they are complete.
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void WaitStores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements; lane 8 * m + i passes the address of row i of
// matrix m, and x[m] has columns 2 * (lane % 4) + {0, 1} of its row lane / 4.
__device__ __forceinline__ void StoreMatrices(uint32_t shared, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Required before using a map that the host has copied to global memory since the address was last
// used.
__device__ __forceinline__ void AcquireTensorMap(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Prefetches a map that is in a kernel's parameter, before its first use.
__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders the calling thread's ordinary writes to shared memory before accesses by wgmma and TMA
// after the next barrier.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- launches -----------------------------------------------------------------------------------

// Programmatic dependent launch: a launch may start before the previous one on the stream has
// ended; without it both functions do nothing. Waits until all earlier launches have ended and
// their writes are visible.
__device__ __forceinline__ void AwaitEarlierLaunches() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Once all blocks have called it, the next launch may start as blocks find room. A launch that
// starts early must await the earlier ones before it ends, so that awaiting it means awaiting all.
__device__ __forceinline__ void AllowNextLaunch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- registers ----------------------------------------------------------------------------------

// Called by all threads of a warpgroup: release registers, or wait until enough are free.
template <int kRegisters>
__device__ __forceinline__ void ReleaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace attend::cuda

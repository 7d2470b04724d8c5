// SPDX-License-Identifier: Apache-2.0
//
// Device primitives shared by the CUDA kernels: asynchronous copies to shared memory, element
// conversion. Device code; any thread.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>

#include "kernels/contract/dtype.h"
#include "kernels/contract/problem.h"
#include "kernels/cuda/ptx/exponent_base.cuh"

namespace attend::cuda {

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// A weight of -0 marks a key that its row does not see: it adds nothing to a sum, and is distinct
// from an exp that underflowed to +0. A masked key's value row must not be touched.
__device__ __forceinline__ bool IsHiddenWeight(float weight) {
  return __float_as_uint(weight) == 0x80000000u;
}

__device__ __forceinline__ bool NonFinite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

// threadIdx.x, opaque to the compiler, so that values derived from it are recomputed where needed
// instead of occupying registers across the loop over keys.
__device__ __forceinline__ int ThreadIndex() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The larger; NaN if either is.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// A mean of finite fp32 values is within fp32's range; rounding alone can carry it beyond, so clamp
// it.
__device__ __forceinline__ float Mean(float sum, float factor) {
  const float mean = sum * factor;
  return isinf(mean) && !NonFinite(sum) ? copysignf(FLT_MAX, mean) : mean;
}

// Two floats, rounded to nearest, in one register: `low` in its lower half.
template <bool kBfloat16>
__device__ __forceinline__ uint32_t PackPair(float low, float high) {
  uint32_t packed;
  if constexpr (kBfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Likewise, a mean of 16-bit values is no larger than the largest of them, but rounded weights may
// carry it half a step beyond, to where it rounds to Inf. `factor` turns a row's sums into means;
// returns a factor that avoids this, lower by at most that half step. `largest` is the sums'
// largest magnitude; NaN and Inf stay.
template <bool kBfloat16>
__device__ __forceinline__ float KeepFinite(float factor, float largest) {
  constexpr float kMost = kBfloat16 ? 0x1.fep127f : 65504.0f;
  const float most = largest * factor;
  // Quarters, because __fdividef returns 0 for divisors above 2^126.
  const float less = factor * __fdividef(0.25f * kMost, 0.25f * most);
  return most > kMost && !NonFinite(most) ? less : factor;
}

// Shared memory address as PTX instructions take it.
__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 (or 4) bytes to shared memory asynchronously; writes zeros, without reading, if not
// `valid`.
__device__ __forceinline__ void CopyAsync16(float* shared, const float* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyAsync4(float* shared, const float* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(shared)),
               "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// Waits for all asynchronous copies of the calling thread.
__device__ __forceinline__ void WaitCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float4 LoadShared4(const float* shared) {
  return *reinterpret_cast<const float4*>(shared);
}

__device__ __forceinline__ float Widen(DType dtype, uint16_t bits) {
  return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(bits))
                                  : __bfloat162float(__ushort_as_bfloat16(bits));
}

__device__ __forceinline__ uint16_t Narrow(DType dtype, float value) {
  return dtype == DType::kFloat16 ? __half_as_ushort(__float2half_rn(value))
                                  : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Element `index` of an array of `dtype`.
__device__ __forceinline__ float LoadGlobal(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  return Widen(dtype, static_cast<const uint16_t*>(data)[index]);
}

// Element `index` of a bias, the only array that may be of bits.
__device__ __forceinline__ float LoadGlobalBias(const BiasView& bias, int64_t index) {
  if (bias.dtype == DType::kBit) return BitAsBias(static_cast<const uint8_t*>(bias.data), index);
  return LoadGlobal(bias.data, bias.dtype, index);
}

__device__ __forceinline__ void StoreGlobal(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = Narrow(dtype, value);
  }
}

// Address of element `index`.
__host__ __device__ __forceinline__ const void* Advance(const void* data, DType dtype,
                                                        int64_t index) {
  return static_cast<const char*>(data) + index * DTypeBytes(dtype);
}
__host__ __device__ __forceinline__ void* Advance(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * DTypeBytes(dtype);
}

// Whether every row (`stride` elements apart) can be read or written four elements at a time.
__device__ __forceinline__ bool FourAligned(const void* data, DType dtype, int64_t stride,
                                            int64_t dim) {
  const uint64_t bytes = 4 * DTypeBytes(dtype);
  return reinterpret_cast<uint64_t>(data) % bytes == 0 && stride % 4 == 0 && dim % 4 == 0;
}

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Tensor Core instructions of Ampere and later on 16-bit data, and a shared memory layout that
// ldmatrix reads without bank conflicts. Device code; all lanes of a warp call each function
// together.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {

// ---- tiles in shared memory ---------------------------------------------------------------------

// A tile of rows of kDim 16-bit elements, in 16-byte chunks. The eight rows that one ldmatrix phase
// reads start in the same bank if rows are a multiple of 128 bytes, and in two if they are an odd
// multiple of 64; the chunk index is therefore XORed with the row.
template <int kDim>
struct TileRow {
  static_assert(kDim % 32 == 0);
  static constexpr int kBytes = 2 * kDim;
  static constexpr int kChunks = kDim / 8;
  // Number of chunks that the swizzle permutes.
  static constexpr int kSpan = kDim % 64 == 0 ? 8 : 4;

  __host__ __device__ static constexpr int Swizzle(int row) {
    return kSpan == 8 ? row & 7 : (row >> 1) & 3;
  }
  // Byte offset of a chunk of a row.
  __host__ __device__ static constexpr int Offset(int row, int chunk) {
    return row * kBytes + 16 * (chunk ^ Swizzle(row));
  }
};

// Which of a 16 x 16 block's four 8 x 8 matrices ldmatrix.x4 returns second; the first and last are
// fixed. Products take pairs of adjacent registers, which determines the choice.
enum class Second {
  kRows,     // rows 8-15 of the first eight columns: Q, and V (transposed)
  kColumns,  // rows 0-7 of the last eight columns: K
};

// Offset of the row whose address a lane passes to ldmatrix.x4, for each 16 x 16 block of a tile.
template <int kDim>
struct BlockOffsets {
  using Row = TileRow<kDim>;
  uint32_t first;  // in the first block

  __device__ __forceinline__ explicit BlockOffsets(Second second) {
    const int matrix = threadIdx.x % 32 / 8;
    const int right = second == Second::kRows ? matrix / 2 : matrix % 2;
    const int low = second == Second::kRows ? matrix % 2 : matrix / 2;
    first = Row::Offset(8 * low + threadIdx.x % 8, right);
  }
  // Rows [16 * row_block, +16), columns [16 * col_block, +16); both compile-time constants.
  __device__ __forceinline__ uint32_t At(int row_block, int col_block) const {
    // Adjacent blocks differ in chunk bits that the swizzle XORs, other spans in higher bits.
    constexpr int kSpanBlocks = Row::kSpan / 2;
    return (first ^ (col_block % kSpanBlocks * 32)) + row_block * 16 * Row::kBytes +
           col_block / kSpanBlocks * kSpanBlocks * 32;
  }
};

// ---- asynchronous copies ------------------------------------------------------------------------

// Copies 16 bytes to shared memory asynchronously; writes zeros, without reading, if not `valid`.
__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kPending most recent groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void WaitCopyGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void StoreShared16(uint32_t shared, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Up to eight elements, zeros beyond `columns`; any alignment.
__device__ __forceinline__ uint4 LoadPiecewise(const char* data, int columns) {
  const auto* elements = reinterpret_cast<const uint16_t*>(data);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < columns) words[e / 2] |= static_cast<uint32_t>(elements[e]) << (16 * (e % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// ---- fragments ----------------------------------------------------------------------------------

// Loads the four 8 x 8 matrices of a 16 x 16 block, in the order of the lanes' addresses
// (BlockOffsets). Lane l gets columns 2 * (l % 4) and the next of row l / 4 of each. Volatile
// without a "memory" clobber: ordered with barriers and copies, but not with loads.
__device__ __forceinline__ void LoadMatrix(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// The same with each matrix transposed: lane l gets rows 2 * (l % 4) and the next of column l / 4
// of each.
__device__ __forceinline__ void LoadMatrixTransposed(uint32_t shared, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// Transposes an 8 x 8 matrix of which lane l has columns 2 * (l % 4) and the next of row l / 4.
__device__ __forceinline__ uint32_t Transpose(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// c = a b, or c += a b. a: 16 x 16, as LoadMatrix returns it with Second::kRows. b: 16 x 8, b0 its
// first eight rows and b1 its last. c: 16 x 8, lane l has columns 2 * (l % 4) and the next: of row
// l / 4 in c[0], c[1]; of row l / 4 + 8 in c[2], c[3].
template <class Element>
__device__ __forceinline__ void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}
template <class Element>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two adjacent elements of a fragment, rounded to nearest.
template <class Element>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  return PackPair<!std::is_same_v<Element, __half>>(low, high);
}

template <class Element>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }
}

// The four lanes of a row each hold two of every eight columns; transposed among them, each holds
// eight consecutive columns, 16 bytes.
__device__ __forceinline__ void TransposeQuad(uint32_t (&x)[4], int lane) {
  const bool odd = lane & 1;
  const bool high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t give = odd ? x[i] : x[i + 1];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, give, 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t give = high ? x[i] : x[i + 2];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, give, 2);
    (high ? x[i] : x[i + 2]) = got;
  }
}

// Sets bit 15 of each half of a pair that is NaN or Inf.
template <class Element>
__device__ __forceinline__ uint32_t NonFinitePair(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7c007c00u : 0x7f807f80u;
  constexpr uint32_t kLowestBit = std::is_same_v<Element, __half> ? 0x04000400u : 0x00800080u;
  return ((pair & kExponent) + kLowestBit) & 0x80008000u;
}

// Whether any of eight elements is NaN or Inf, and the elements with those replaced by 0.
template <class Element>
__device__ __forceinline__ bool AnyNonFinite(const uint4& x) {
  return (NonFinitePair<Element>(x.x) | NonFinitePair<Element>(x.y) | NonFinitePair<Element>(x.z) |
          NonFinitePair<Element>(x.w)) != 0;
}
template <class Element>
__device__ __forceinline__ uint32_t WithoutNonFinite(uint32_t pair) {
  return pair & ~((NonFinitePair<Element>(pair) >> 15) * 0xffffu);
}
template <class Element>
__device__ __forceinline__ uint4 WithoutNonFinite(const uint4& x) {
  return make_uint4(WithoutNonFinite<Element>(x.x), WithoutNonFinite<Element>(x.y),
                    WithoutNonFinite<Element>(x.z), WithoutNonFinite<Element>(x.w));
}

}  // namespace attend::cuda

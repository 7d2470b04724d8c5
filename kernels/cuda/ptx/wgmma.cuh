// SPDX-License-Identifier: Apache-2.0
//
// Hopper's matrix instruction wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-
// Accumulate"): the 128 threads of a warpgroup multiply a 64 x 16 tile of A by a 16 x N tile of B
// and add to a 64 x N tile of fp32. B is in shared memory, A there or in registers. Device code for
// sm_90a.
//
// Fragments: the accumulator of thread t, d[4 * j + i], is row 16 * (t / 32) + (t % 32) / 4 + 8 *
// (i / 2), column 8 * j + 2 * (t % 4) + i % 2. A in registers has the same rows; a[0], a[1] hold
// columns 2 * (t % 4) + {0, 1} of the upper and lower row, a[2], a[3] those 8 to the right. So the
// accumulators of one product, rounded in pairs, are the A operand of the next.

#pragma once

#include <cstdint>

namespace attend::cuda {

// ---- operands in shared memory ------------------------------------------------------------------

// A tile that TMA wrote as boxes of kCols columns (64: 128-byte swizzle, 32: 64-byte swizzle) on
// 1024-byte boundaries, as the two halves of a matrix descriptor. Units are 16 bytes: bits 0-13
// address, 16-29 leading and 32-45 stride byte offset, 62-63 swizzle.
template <int kCols>
struct SmemTile {
  static_assert(kCols == 64 || kCols == 32);
  static constexpr uint32_t kRowBytes = 2 * kCols;
  static constexpr uint32_t kHigh = 8 * kRowBytes / 16 | (kCols == 64 ? 1u : 2u) << 30;

  uint32_t low;

  // The product's depth runs along a row. A step of 16 columns is 32 bytes. `address` is in shared
  // memory.
  static __device__ __forceinline__ SmemTile AlongRows(uint32_t address) {
    return {(address & 0x3ffff) >> 4 | 1u << 16};
  }
  // The depth runs down the rows, N along them over boxes that are `box_bytes` apart. A step of 16
  // rows is 16 * kRowBytes.
  static __device__ __forceinline__ SmemTile DownRows(uint32_t address, uint32_t box_bytes) {
    return {(address & 0x3ffff) >> 4 | box_bytes / 16 << 16};
  }

  // The descriptor of the data `bytes` further on.
  __device__ __forceinline__ uint64_t At(uint32_t bytes) const {
    return static_cast<uint64_t>(kHigh) << 32 | (low + bytes / 16);
  }
};

// ---- order --------------------------------------------------------------------------------------

// Required before the first wgmma, and whenever other instructions have written registers that it
// uses.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of results above the wait (or writes of operands below the
// issue).
template <int kCount>
__device__ __forceinline__ void HoldRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void HoldRegisters(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// ---- the instruction ----------------------------------------------------------------------------

// d = A B + (accumulate ? d : 0) for one depth step of 16. Shared: A and B in shared memory, A
// along its rows; Registers: A in registers. kDown: B's depth runs down its rows
// (SmemTile::DownRows).
template <int kN, bool kBfloat16>
struct Wgmma;

// The operand numbers of the N / 2 accumulators, and their registers.
#define ATTEND_TEXT_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTEND_TEXT_64 \
  ATTEND_TEXT_32       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTEND_TEXT_80 ATTEND_TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define ATTEND_TEXT_96 ATTEND_TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define ATTEND_TEXT_112 ATTEND_TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define ATTEND_TEXT_128 ATTEND_TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define ATTEND_TEXT_192                                                                \
  ATTEND_TEXT_128                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define ATTEND_TEXT_256                                                      \
  ATTEND_TEXT_192                                                            \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "   \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define ATTEND_D(i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define ATTEND_D_32 ATTEND_D(0), ATTEND_D(8)
#define ATTEND_D_64 ATTEND_D_32, ATTEND_D(16), ATTEND_D(24)
#define ATTEND_D_80 ATTEND_D_64, ATTEND_D(32)
#define ATTEND_D_96 ATTEND_D_80, ATTEND_D(40)
#define ATTEND_D_112 ATTEND_D_96, ATTEND_D(48)
#define ATTEND_D_128 ATTEND_D_112, ATTEND_D(56)
#define ATTEND_D_192 ATTEND_D_128, ATTEND_D(64), ATTEND_D(72), ATTEND_D(80), ATTEND_D(88)
#define ATTEND_D_256 ATTEND_D_192, ATTEND_D(96), ATTEND_D(104), ATTEND_D(112), ATTEND_D(120)

// P0 ... P6 are the operand numbers after the accumulators'.
#define ATTEND_WGMMA(N, BF16, TYPE, P0, P1, P2, P3, P4, P5, P6)                              \
  template <>                                                                                \
  struct Wgmma<N, BF16> {                                                                    \
    template <bool kDown>                                                                    \
    static __device__ __forceinline__ void Shared(float (&d)[N / 2], uint64_t a, uint64_t b, \
                                                  bool accumulate) {                         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2                                     \
                   ", 0; "                                                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                   " {" ATTEND_TEXT_##N "}, %" #P0 ", %" #P1 ", p, 1, 1, 0, %" #P3 ";}"      \
                   : ATTEND_D_##N                                                            \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kDown ? 1 : 0)); \
    }                                                                                        \
    template <bool kDown>                                                                    \
    static __device__ __forceinline__ void Registers(float (&d)[N / 2], const uint32_t* a,   \
                                                     uint64_t b, bool accumulate) {          \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5                                     \
                   ", 0; "                                                                   \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                   " {" ATTEND_TEXT_##N "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 \
                                        ", p, 1, 1, %" #P6 ";}"                              \
                   : ATTEND_D_##N                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                     \
                     "r"(static_cast<int>(accumulate)), "n"(kDown ? 1 : 0));                 \
    }                                                                                        \
  };

// Both fp16 and bf16.
#define ATTEND_WGMMA_BOTH(N, ...)            \
  ATTEND_WGMMA(N, false, "f16", __VA_ARGS__) \
  ATTEND_WGMMA(N, true, "bf16", __VA_ARGS__)

ATTEND_WGMMA_BOTH(32, 16, 17, 18, 19, 20, 21, 22)
ATTEND_WGMMA_BOTH(64, 32, 33, 34, 35, 36, 37, 38)
ATTEND_WGMMA_BOTH(80, 40, 41, 42, 43, 44, 45, 46)
ATTEND_WGMMA_BOTH(96, 48, 49, 50, 51, 52, 53, 54)
ATTEND_WGMMA_BOTH(112, 56, 57, 58, 59, 60, 61, 62)
ATTEND_WGMMA_BOTH(128, 64, 65, 66, 67, 68, 69, 70)
ATTEND_WGMMA_BOTH(192, 96, 97, 98, 99, 100, 101, 102)
ATTEND_WGMMA_BOTH(256, 128, 129, 130, 131, 132, 133, 134)

#undef ATTEND_TEXT_32
#undef ATTEND_TEXT_64
#undef ATTEND_TEXT_80
#undef ATTEND_TEXT_96
#undef ATTEND_TEXT_112
#undef ATTEND_TEXT_128
#undef ATTEND_TEXT_192
#undef ATTEND_TEXT_256
#undef ATTEND_D_32
#undef ATTEND_D_64
#undef ATTEND_D_80
#undef ATTEND_D_96
#undef ATTEND_D_112
#undef ATTEND_D_128
#undef ATTEND_D_192
#undef ATTEND_D_256
#undef ATTEND_D
#undef ATTEND_WGMMA
#undef ATTEND_WGMMA_BOTH

}  // namespace attend::cuda

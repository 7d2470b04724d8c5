// SPDX-License-Identifier: Apache-2.0
//
// Hopper's matrix instruction (wgmma.cuh) against products computed on the host: every width, both
// types, operands in boxes of 64 and of 32 columns. The matrices are of small integers, so that all
// sums are exact.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/contract/dtype.h"
#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "tests/kernels/support/cuda_hopper_model.cuh"
#include "tests/kernels/support/cuda_on_device.h"

// nvcc: a member of googletest's classes is never referenced.
#pragma nv_diag_suppress 177

namespace attend::cuda {
namespace {

class CudaWgmma : public HopperTest {};

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kDepth = 80;  // five instructions' worth: more than one box

// kRegisters: A is in registers; kDown: B's depth runs down its rows.
template <int kN_, bool kBfloat16_, int kCols_, bool kRegisters_, bool kDown_>
struct Form {
  static constexpr int kN = kN_;
  static constexpr bool kBfloat16 = kBfloat16_;
  static constexpr int kCols = kCols_;
  static constexpr bool kRegisters = kRegisters_;
  static constexpr bool kDown = kDown_;

  static constexpr int Boxes(int cols) { return (cols + kCols - 1) / kCols; }
  static constexpr int kRowsB = kDown ? kDepth : kN;
  static constexpr int kColsB = kDown ? kN : kDepth;
  static constexpr int kBoxBytesA = kRows * 2 * kCols;
  static constexpr int kBoxBytesB = kRowsB * 2 * kCols;
  static constexpr int kBytesA = Boxes(kDepth) * kBoxBytesA;
  static constexpr int kBytes = kBytesA + Boxes(kColsB) * kBoxBytesB;
};

// A matrix as consecutive boxes.
template <int kCols>
__device__ __forceinline__ void WriteBoxes(const uint16_t* matrix, int rows, int cols,
                                           char* shared) {
  for (int i = threadIdx.x; i < rows * cols; i += kThreads) {
    const int row = i / cols;
    const int col = i % cols;
    char* box = shared + col / kCols * rows * 2 * kCols;
    *reinterpret_cast<uint16_t*>(box + BoxOffset(kCols, row, col % kCols)) = matrix[i];
  }
}

// A's fragments for all of the depth, four registers for each 16 columns.
__device__ __forceinline__ void ReadFragments(const uint16_t* a,
                                              uint32_t (&fragments)[kDepth / 4]) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int col = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kDepth / 4; ++n) {
    const uint16_t* pair = a + (row + n % 2 * 8) * kDepth + col + n / 2 * 8;
    fragments[n] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

// Issues the product over kSteps depths of 16, which is added to what d holds if `accumulate`. A
// lies at `shared_a` (or in `fragments`), B at `shared_b`.
template <class F, int kSteps>
__device__ __forceinline__ void Issue(uint32_t shared_a, uint32_t (&fragments)[kDepth / 4],
                                      uint32_t shared_b, bool accumulate, float (&d)[F::kN / 2]) {
  using W = Wgmma<F::kN, F::kBfloat16>;
  using Tile = SmemTile<F::kCols>;
  constexpr int kStepsInBox = F::kCols / 16;
  const auto a = Tile::AlongRows(shared_a);
  const auto b = F::kDown ? Tile::DownRows(shared_b, F::kBoxBytesB) : Tile::AlongRows(shared_b);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    const int along = 32 * (n % kStepsInBox);
    const uint64_t at_b =
        b.At(F::kDown ? 16 * 2 * F::kCols * n : n / kStepsInBox * F::kBoxBytesB + along);
    if constexpr (F::kRegisters) {
      W::template Registers<F::kDown>(d, fragments + 4 * n, at_b, accumulate || n > 0);
    } else {
      W::template Shared<F::kDown>(d, a.At(n / kStepsInBox * F::kBoxBytesA + along), at_b,
                                   accumulate || n > 0);
    }
  }
}

// d = the product over kSteps depths of 16; the previous value of d does not count.
template <class F, int kSteps>
__device__ __forceinline__ void Multiply(uint32_t shared, uint32_t (&fragments)[kDepth / 4],
                                         float (&d)[F::kN / 2]) {
  WgmmaFence();
  Issue<F, kSteps>(shared, fragments, shared + F::kBytesA, false, d);
  WgmmaCommit();
  WgmmaWait<0>();
  HoldRegisters(d);
  HoldRegisters(fragments);
}

template <int kN>
__device__ __forceinline__ void WriteProduct(const float (&d)[kN / 2], float* out) {
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + n % 4 / 2 * 8;
    const int col = n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2;
    out[row * kN + col] = d[n];
  }
}

// a: [kRows][kDepth]; b: [depth][n] if kDown, else [n][depth]; out[0]: the product of the first 16
// depths, out[1]: of all.
template <class F>
__global__ void __launch_bounds__(kThreads)
    MultiplyBoxes(const uint16_t* a, const uint16_t* b, float* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  char* shared = AlignedShared();
  FillShared(shared, F::kBytes);  // NaN, where no matrix is
  WriteBoxes<F::kCols>(a, kRows, kDepth, shared);
  WriteBoxes<F::kCols>(b, F::kRowsB, F::kColsB, shared + F::kBytesA);
  FenceAsyncProxy();
  __syncthreads();
  uint32_t fragments[kDepth / 4];
  ReadFragments(a, fragments);
  float d[F::kN / 2];
#pragma unroll
  for (int n = 0; n < F::kN / 2; ++n) d[n] = 1000.0f;
  Multiply<F, 1>(SharedAddress(shared), fragments, d);
  WriteProduct<F::kN>(d, out);
  Multiply<F, kDepth / 16>(SharedAddress(shared), fragments, d);
  WriteProduct<F::kN>(d, out + kRows * F::kN);
#endif
}

float ElementA(int row, int depth) { return static_cast<float>((row * 7 + depth * 37) % 23 - 11); }
float ElementB(int depth, int n) { return static_cast<float>((depth * 53 + n * 5) % 19 - 9); }

template <class F>
uint16_t Encode(float x) {
  return F::kBfloat16 ? FloatToBFloat16(x) : FloatToHalf(x);
}

template <class F>
std::vector<uint16_t> MatrixA() {
  std::vector<uint16_t> a;
  for (int i = 0; i < kRows * kDepth; ++i) {
    a.push_back(Encode<F>(ElementA(i / kDepth, i % kDepth)));
  }
  return a;
}

template <class F>
std::vector<uint16_t> MatrixB() {
  std::vector<uint16_t> b;
  for (int i = 0; i < kDepth * F::kN; ++i) {
    const int row = i / F::kColsB;
    const int col = i % F::kColsB;
    b.push_back(Encode<F>(F::kDown ? ElementB(row, col) : ElementB(col, row)));
  }
  return b;
}

template <class F>
void CheckProduct() {
  OnDevice<uint16_t> a(MatrixA<F>()), b(MatrixB<F>());
  OnDevice<float> out(std::vector<float>(2 * kRows * F::kN));
  constexpr int kBytes = kAlignmentBytes + F::kBytes;
  ASSERT_EQ(
      cudaFuncSetAttribute(MultiplyBoxes<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      cudaSuccess);
  MultiplyBoxes<F><<<1, kThreads, kBytes>>>(a.get(), b.get(), out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> got = out.Read();
  for (int i = 0; i < kRows * F::kN; ++i) {
    float first = 0, all = 0;
    for (int k = 0; k < kDepth; ++k) {
      all += ElementA(i / F::kN, k) * ElementB(k, i % F::kN);
      if (k == 15) first = all;
    }
    const auto where = [i] {
      return testing::Message() << "n" << F::kN << (F::kBfloat16 ? " bf16 " : " f16 ") << F::kCols
                                << " columns " << F::kRegisters << F::kDown << " at " << i / F::kN
                                << "," << i % F::kN;
    };
    ASSERT_EQ(got[i], first) << where();
    ASSERT_EQ(got[kRows * F::kN + i], all) << where();
  }
}

template <int kN, bool kRegisters, bool kDown, int kCols>
void CheckTypes() {
  CheckProduct<Form<kN, false, kCols, kRegisters, kDown>>();
  CheckProduct<Form<kN, true, kCols, kRegisters, kDown>>();
}

// Partly: B's last box is wider than N requires.
enum class LastBox { kWhole, kInPart };

template <bool kRegisters, int... kN>
void CheckAlongRows(std::integer_sequence<int, kN...>) {
  (CheckTypes<kN, kRegisters, false, 64>(), ...);
  (CheckTypes<kN, kRegisters, false, 32>(), ...);
}

template <LastBox kLast, int kN, bool kRegisters, int kCols>
void CheckDownRowsOf() {
  if constexpr ((kN % kCols == 0) == (kLast == LastBox::kWhole)) {
    CheckTypes<kN, kRegisters, true, kCols>();
  }
}

template <LastBox kLast, bool kRegisters, int... kN>
void CheckDownRows(std::integer_sequence<int, kN...>) {
  (CheckDownRowsOf<kLast, kN, kRegisters, 64>(), ...);
  (CheckDownRowsOf<kLast, kN, kRegisters, 32>(), ...);
}

using EveryN = std::integer_sequence<int, 64, 80, 96, 112, 128, 192, 256>;

TEST_F(CudaWgmma, SharedAlongRows) { CheckAlongRows<false>(EveryN{}); }
TEST_F(CudaWgmma, RegistersAlongRows) { CheckAlongRows<true>(EveryN{}); }
TEST_F(CudaWgmma, SharedDownRows) { CheckDownRows<LastBox::kWhole, false>(EveryN{}); }
TEST_F(CudaWgmma, RegistersDownRows) { CheckDownRows<LastBox::kWhole, true>(EveryN{}); }
TEST_F(CudaWgmma, SharedDownRowsLastBoxInPart) { CheckDownRows<LastBox::kInPart, false>(EveryN{}); }
TEST_F(CudaWgmma, RegistersDownRowsLastBoxInPart) {
  CheckDownRows<LastBox::kInPart, true>(EveryN{});
}

// ---- two groups in flight -----------------------------------------------------------------------

constexpr int kRepeats = 16;

// Two groups: the product with the first of two equal matrices B, and kRepeats times that with the
// second. When at most one group is left, the first result is used and its B is overwritten, as
// kernels overwrite keys whose scores are done, while the second may still run.
template <class F>
__global__ void __launch_bounds__(kThreads)
    MultiplyTwice(const uint16_t* a, const uint16_t* b, float* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBytesB = F::kBytes - F::kBytesA;
  char* shared = AlignedShared();
  char* first_b = shared + F::kBytesA;
  WriteBoxes<F::kCols>(a, kRows, kDepth, shared);
  WriteBoxes<F::kCols>(b, F::kRowsB, F::kColsB, first_b);
  WriteBoxes<F::kCols>(b, F::kRowsB, F::kColsB, first_b + kBytesB);
  FenceAsyncProxy();
  __syncthreads();
  uint32_t fragments[kDepth / 4];
  ReadFragments(a, fragments);
  float first[F::kN / 2], second[F::kN / 2];
#pragma unroll
  for (int n = 0; n < F::kN / 2; ++n) first[n] = second[n] = 0.0f;
  const uint32_t at_a = SharedAddress(shared);
  const uint32_t at_b = SharedAddress(first_b);
  WgmmaFence();
  Issue<F, kDepth / 16>(at_a, fragments, at_b, false, first);
  WgmmaCommit();
#pragma unroll
  for (int n = 0; n < kRepeats; ++n) {
    Issue<F, kDepth / 16>(at_a, fragments, at_b + kBytesB, n > 0, second);
  }
  WgmmaCommit();
  WgmmaWait<1>();
  HoldRegisters(first);
  WriteProduct<F::kN>(first, out);
  __syncthreads();
  FillShared(first_b, kBytesB);  // NaN
  WgmmaWait<0>();
  HoldRegisters(second);
  HoldRegisters(fragments);
  WriteProduct<F::kN>(second, out + kRows * F::kN);
#endif
}

template <class F>
void CheckTwoGroups() {
  OnDevice<uint16_t> a(MatrixA<F>()), b(MatrixB<F>());
  OnDevice<float> out(std::vector<float>(2 * kRows * F::kN));
  constexpr int kBytes = kAlignmentBytes + 2 * F::kBytes - F::kBytesA;
  ASSERT_EQ(
      cudaFuncSetAttribute(MultiplyTwice<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      cudaSuccess);
  MultiplyTwice<F><<<1, kThreads, kBytes>>>(a.get(), b.get(), out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> got = out.Read();
  for (int i = 0; i < kRows * F::kN; ++i) {
    float product = 0;
    for (int k = 0; k < kDepth; ++k) product += ElementA(i / F::kN, k) * ElementB(k, i % F::kN);
    ASSERT_EQ(got[i], product) << i / F::kN << "," << i % F::kN;
    ASSERT_EQ(got[kRows * F::kN + i], kRepeats * product) << i / F::kN << "," << i % F::kN;
  }
}

TEST_F(CudaWgmma, TheFirstOfTwoGroupsIsUsedWhileTheSecondRuns) {
  CheckTwoGroups<Form<128, false, 64, false, false>>();
  CheckTwoGroups<Form<128, true, 64, true, true>>();
  CheckTwoGroups<Form<96, true, 32, false, true>>();
}

}  // namespace
}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels beyond 32 bits: tensors whose parts are far apart, and very long sequences.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

// The far stride: the second sequence, the second head, or rows from the 32nd on, lie more than
// 2^31 elements after the first.
enum class Far { kBatch, kHead, kRow };
constexpr const char* kFarNames[] = {"batch", "head", "row"};

constexpr int64_t kFarStride = (int64_t{1} << 31) + 4096;
constexpr int64_t kFarRowStride = (int64_t{1} << 26) + (int64_t{1} << 18);
constexpr int64_t kDim = 64;
// Q, K, V and O lie between one another: where one's first part ends, the next one's begins, and
// so on after each stride.
constexpr int64_t kPitch = 1 << 16;
// Room for 64 rows of fp32, 128 of 16 bits, that far apart.
constexpr int64_t kFarRowsBytes = 256;
constexpr int64_t kFarBytes = kFarRowStride * kFarRowsBytes + (int64_t{1} << 23);
static_assert(kFarBytes < int64_t{20} << 30 && 4 * kPitch <= kFarRowStride);
static_assert((kFarStride + 4 * kPitch) * 4 <= kFarBytes);

ProblemSpec FarSpec(Far far, DType dtype) {
  switch (far) {
    case Far::kBatch:
      return MakeSpec(2, 2, 1, 40, 64, kDim, kDim, dtype);
    case Far::kHead:
      return MakeSpec(1, 2, 2, 40, 64, kDim, kDim, dtype);
    default: {
      const int64_t rows = kFarRowsBytes / DTypeBytes(dtype) - 3;  // no whole tiles
      return MakeSpec(1, 1, 1, rows, rows, kDim, kDim, dtype);
    }
  }
}

// Dense but for the far stride.
template <class View>
View FarView(Far far, char* data, int64_t heads, int64_t rows) {
  View view;
  view.data = data;
  view.stride_l = far == Far::kRow ? kFarRowStride : kDim;
  view.stride_h = far == Far::kHead ? kFarStride : rows * kDim;
  view.stride_b = far == Far::kBatch ? kFarStride : heads * view.stride_h;
  return view;
}

template <class View>
char* RowOf(const View& view, DType dtype, int64_t b, int64_t h, int64_t i) {
  const int64_t element = b * view.stride_b + h * view.stride_h + i * view.stride_l;
  return static_cast<char*>(const_cast<void*>(view.data)) + element * DTypeBytes(dtype);
}

// All rows of a tensor of the host to another of the device.
void CopyRows(const ConstTensorView& from, const ConstTensorView& to, DType dtype, int64_t batch,
              int64_t heads, int64_t rows) {
  const auto bytes = static_cast<size_t>(kDim * DTypeBytes(dtype));
  for (int64_t n = 0; n < batch * heads * rows; ++n) {
    const int64_t b = n / rows / heads;
    const int64_t h = n / rows % heads;
    ASSERT_EQ(cudaMemcpy(RowOf(to, dtype, b, h, n % rows), RowOf(from, dtype, b, h, n % rows),
                         bytes, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
}

// Runs `run`'s attention with its tensors in `memory`, where O holds NaN.
Attention Spread(Far far, const OwnedAttention& owned, const DeviceRun& run, char* memory) {
  Attention a = run.attention();
  const Problem& p = a.problem;
  const int64_t pitch = kPitch * DTypeBytes(p.dtype);
  a.q = FarView<ConstTensorView>(far, memory, p.heads_q, p.len_q);
  a.k = FarView<ConstTensorView>(far, memory + pitch, p.heads_kv, p.len_k);
  a.v = FarView<ConstTensorView>(far, memory + 2 * pitch, p.heads_kv, p.len_k);
  a.o = FarView<TensorView>(far, memory + 3 * pitch, p.heads_q, p.len_q);
  CopyRows(owned.attention.q, a.q, p.dtype, p.batch, p.heads_q, p.len_q);
  CopyRows(owned.attention.k, a.k, p.dtype, p.batch, p.heads_kv, p.len_k);
  CopyRows(owned.attention.v, a.v, p.dtype, p.batch, p.heads_kv, p.len_k);
  const auto bytes = static_cast<size_t>(kDim * DTypeBytes(p.dtype));
  for (int64_t n = 0; n < p.batch * p.heads_q * p.len_q; ++n) {
    char* row = RowOf(a.o, p.dtype, n / p.len_q / p.heads_q, n / p.len_q % p.heads_q, n % p.len_q);
    EXPECT_EQ(cudaMemset(row, 0xff, bytes), cudaSuccess);
  }
  return a;
}

void CheckFar(Far far, KernelId kernel, DType dtype, char* memory, uint64_t seed) {
  const ProblemSpec spec = FarSpec(far, dtype);
  const std::string label =
      std::string("far ") + kFarNames[static_cast<int>(far)] + " " + Label(spec, kernel, -1, seed);
  OwnedAttention owned = MakeAttention(spec, seed);
  if (!CanRun(owned.attention, kernel)) return;
  DeviceRun run(&owned, kernel);
  ASSERT_TRUE(run.Run().ok());
  const Attention a = Spread(far, owned, run, memory);
  ASSERT_TRUE(CanRun(a, kernel)) << label;  // strides below the copy engine's limit
  const cuda::LaunchItem item{kernel, a};
  const Result<int64_t> workspace_bytes = cuda::BatchWorkspaceBytes({&item, 1});
  ASSERT_TRUE(workspace_bytes.ok());
  const DeviceMemory workspace(*workspace_bytes);
  ASSERT_NE(workspace.get(), nullptr);
  ASSERT_EQ(cudaMemset(workspace.get(), 0, cuda::kTileQueueBytes), cudaSuccess);
  const Status status = cuda::LaunchBatch({&item, 1}, workspace.get(), *workspace_bytes, nullptr);
  ASSERT_TRUE(status.ok()) << status.ToString() << "\n" << label;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << label;
  const Problem& p = a.problem;
  std::vector<char> got(static_cast<size_t>(kDim * DTypeBytes(dtype)));
  for (int64_t n = 0; n < p.batch * p.heads_q * p.len_q; ++n) {
    const int64_t b = n / p.len_q / p.heads_q;
    const int64_t h = n / p.len_q % p.heads_q;
    const int64_t i = n % p.len_q;
    ASSERT_EQ(
        cudaMemcpy(got.data(), RowOf(a.o, dtype, b, h, i), got.size(), cudaMemcpyDeviceToHost),
        cudaSuccess);
    ASSERT_EQ(std::memcmp(got.data(), owned.O(b, h, i, 0), got.size()), 0)
        << "sequence " << b << " head " << h << " row " << i << " " << label;
  }
}

// The same bits as from memory side by side.
TEST(CudaFar, OffsetsBeyondThirtyTwoBitsAreRight) {
  const DeviceMemory memory(kFarBytes);
  if (memory.get() == nullptr) {
    GTEST_SKIP() << "needs " << kFarBytes << " bytes of device memory";
  }
  const uint64_t seed = FreshSeed();
  for (const KernelId kernel : kCudaKernels) {
    for (const Far far : {Far::kBatch, Far::kHead, Far::kRow}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
        ASSERT_NO_FATAL_FAILURE(CheckFar(far, kernel, dtype, memory.get(), seed));
      }
    }
  }
}

TEST(CudaFar, AHundredThousandKeysAreRight) {
  const uint64_t seed = FreshSeed();
  for (const int64_t right : {int64_t{-1}, int64_t{0}}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 131072, 131072, 128, 128);
    spec.problem.mask.right = right;
    OwnedAttention owned = MakeAttention(spec, seed);
    const Status status = RunOnDevice(&owned, KernelId::kCudaFlashFp32);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const std::vector<RowId> rows = SampleRows(owned.attention, seed, 48 * CheckWork(spec.problem));
    EXPECT_GE(rows.size(), 24u);
    const RowsReport report = CheckRows(owned.attention, rows);
    EXPECT_TRUE(report.ok) << report.detail << "\n"
                           << Label(spec, KernelId::kCudaFlashFp32, -1, seed);
    EXPECT_TRUE(owned.GuardsIntact());
  }
}

// Few rows; every variant, including those for long sequences. The last tile is incomplete.
TEST(CudaFar, AHundredThousandKeysOnTensorCoresAreRight) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kKeys = 131072 + 77;
  for (const int64_t dim : {64, 128, 256}) {
    for (const int64_t right : {-1, 0}) {
      ProblemSpec spec = MakeSpec(1, 1, 1, 100, kKeys, dim, dim, DType::kFloat16);
      spec.problem.mask.right = right;
      OwnedAttention owned = MakeAttention(spec, seed);
      for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
        if (!CanRun(owned.attention, kernel)) continue;
        for (const int config : Configs(spec.problem, kernel)) {
          const std::string label = Label(spec, kernel, config, seed);
          const Status status = RunOnDevice(&owned, kernel, config);
          ASSERT_TRUE(status.ok()) << status.ToString() << "\n" << label;
          constexpr int64_t kRows = 8;
          const std::vector<RowId> rows =
              SampleRows(owned.attention, seed, 2 * kRows * CheckWork(spec.problem));
          EXPECT_GE(rows.size(), static_cast<size_t>(kRows));
          const RowsReport report = CheckRows(owned.attention, rows);
          EXPECT_TRUE(report.ok) << report.detail << "\n" << label;
          EXPECT_TRUE(owned.GuardsIntact()) << label;
        }
      }
    }
  }
}

}  // namespace
}  // namespace attend::test

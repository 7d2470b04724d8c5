// SPDX-License-Identifier: Apache-2.0
//
// Q, K and V that Hopper's copy engine cannot address are copied first: the answer has the bits of
// the same values on 16-byte boundaries, and nothing else is written.

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/ragged/operands.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr KernelId kReadsAligned[] = {KernelId::kCudaFlashSm90, KernelId::kCudaDecodeSm80,
                                      KernelId::kCudaDecodeSm90};

// AlignedSpec's problems with any D, sinks and layout.
ProblemSpec SpecOf(uint64_t seed) {
  std::mt19937_64 random(seed ^ 0x9e3779b9);
  ProblemSpec spec = AlignedSpec(seed);
  Problem& p = spec.problem;
  if (random() % 3 != 0) p.dim = std::vector{3, 60, 72, 90, 100, 127, 150, 255}[random() % 8];
  if (random() % 3 != 0)
    p.dim_v = random() % 2 == 0 ? p.dim : 1 + static_cast<int64_t>(random() % 256);
  p.scale = DefaultScale(p.dim);
  p.return_lse = random() % 4 != 0;
  p.has_sinks = random() % 4 == 0;
  constexpr Layout kLayouts[] = {Layout::kBHLD, Layout::kBLHD, Layout::kStrided};
  spec.layout = kLayouts[random() % 3];
  return spec;
}

// A second copy of an attention's Q, K and V on the device, with rows on 16-byte boundaries.
class AlignedCopies {
 public:
  explicit AlignedCopies(const Attention& from) : attention(from), memory_(Bytes(from)) {
    int64_t at = 0;
    ConstTensorView* const views[] = {&attention.q, &attention.k, &attention.v};
    int n = 0;
    for (const cuda::Operand& operand : cuda::OperandsOf(from)) {
      ConstTensorView& view = *views[n++];
      const int64_t batch = from.problem.packed ? 1 : from.problem.batch;
      view.data = memory_.get() + at;
      view.stride_l = cuda::RepackedColumns(operand.columns);
      view.stride_h = operand.rows * view.stride_l;
      view.stride_b = from.problem.packed ? 0 : operand.heads * view.stride_h;
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t h = 0; h < operand.heads; ++h) {
          Copy(operand, view, b, h);
        }
      }
      at += (2 * batch * operand.heads * view.stride_h + 255) / 256 * 256;
    }
  }

  Attention attention;

 private:
  static int64_t Bytes(const Attention& a) {
    int64_t bytes = 256;
    for (const cuda::Operand& each : cuda::OperandsOf(a)) {
      bytes +=
          2 * a.problem.batch * each.heads * each.rows * cuda::RepackedColumns(each.columns) + 256;
    }
    return bytes;
  }

  void Copy(const cuda::Operand& operand, const ConstTensorView& to, int64_t b, int64_t h) {
    if (operand.rows == 0) return;
    const ConstTensorView& from = operand.view;
    const auto at = [&](const ConstTensorView& view) {
      return static_cast<char*>(const_cast<void*>(view.data)) +
             2 * (b * view.stride_b + h * view.stride_h);
    };
    const cudaError_t error =
        cudaMemcpy2D(at(to), 2 * to.stride_l, at(from), 2 * from.stride_l, 2 * operand.columns,
                     operand.rows, cudaMemcpyDeviceToDevice);
    EXPECT_EQ(error, cudaSuccess);
  }

  DeviceMemory memory_;
};

// Copies the output of `run` to that of `owned`.
void FetchOutput(const DeviceRun& run, OwnedAttention* owned) {
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(owned->output.data, run.output(), static_cast<size_t>(owned->output.bytes),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
}

// Runs a kernel on a problem in place, and on an aligned copy. False if it cannot run there, or
// needs no copy.
bool Compare(const ProblemSpec& spec, uint64_t seed, KernelId kernel) {
  OwnedAttention owned = MakeAttention(spec, seed);
  if (cuda::RepackBytes(kernel, owned.attention) == 0) return false;
  if (!CanRun(owned.attention, kernel)) return false;
  const std::string label = Label(spec, kernel, -1, seed);
  owned.ResetOutput();
  DeviceRun run(&owned, kernel);
  EXPECT_TRUE(run.Run().ok()) << label;
  EXPECT_TRUE(owned.GuardsIntact()) << label;
  const AlignedCopies aligned(run.attention());
  const cuda::LaunchItem item{kernel, aligned.attention};
  EXPECT_EQ(cuda::RepackBytes(kernel, aligned.attention), 0) << "it needs no copy";
  const Result<int64_t> bytes = cuda::BatchWorkspaceBytes({&item, 1});
  EXPECT_TRUE(bytes.ok());
  const DeviceMemory workspace(*bytes);
  EXPECT_EQ(cudaMemset(workspace.get(), 0, static_cast<size_t>(*bytes)), cudaSuccess);
  EXPECT_EQ(cudaMemset(run.output(), 0xff, static_cast<size_t>(owned.output.bytes)), cudaSuccess);
  const Status status = cuda::LaunchBatch({&item, 1}, workspace.get(), *bytes, nullptr);
  EXPECT_TRUE(status.ok()) << status.ToString();
  OwnedAttention again = MakeAttention(spec, seed);
  FetchOutput(run, &again);
  for (int64_t b = 0; b < owned.attention.problem.batch; ++b) {
    const int64_t rows_of = SequenceOf(owned.attention, b).q_rows;
    EXPECT_TRUE(SameBits(Rows(owned, b, rows_of), Rows(again, b, rows_of)))
        << "sequence " << b << " " << label;
  }
  return true;
}

TEST(CudaRepack, AnyAlignmentHasTheBitsOfAlignedMemory) {
  const uint64_t first = FreshSeed();
  const auto count = static_cast<uint64_t>(300 * TestScale());
  int compared = 0;
  for (uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
    ProblemSpec spec = SpecOf(seed);
    spec.misaligned_elements = static_cast<int64_t>(seed % 8);
    for (const KernelId kernel : kReadsAligned) compared += Compare(spec, seed, kernel) ? 1 : 0;
  }
  std::printf("%d compared\n", compared);
}

// A packed tensor has no stride between sequences: only its rows tell where each begins.
TEST(CudaRepack, PackedSequencesHaveTheBitsOfAlignedMemory) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 96, 100, 256}) {
    ProblemSpec spec = MakeSpec(3, 5, 1, 1, 110, dim, dim, DType::kFloat16);
    spec.problem.packed = true;
    spec.q_lengths = {1, 1, 1};
    spec.kv_lengths = {15, 110, 64};
    spec.misaligned_elements = 2;
    for (const KernelId kernel : kReadsAligned) Compare(spec, seed, kernel);
  }
}

// As the server lays them out, and the workspace that it is told they need.
TEST(CudaRepack, ContiguousTensorsNeedTheWorkspaceOfTheirTraits) {
  for (const bool packed : {false, true}) {
    for (const auto& [dim, dim_v] : {std::pair<int64_t, int64_t>{100, 100}, {100, 128}, {64, 3}}) {
      ProblemSpec spec = MakeSpec(2, 4, 2, 33, 50, dim, dim_v, DType::kFloat16);
      spec.problem.packed = packed;
      if (packed) spec.q_lengths = spec.kv_lengths = {20, 7};
      const OwnedAttention owned = MakeAttention(spec, 1);
      const MemoryTraits expected = ContiguousTraits(owned.attention.problem);
      EXPECT_GT(expected.repack_bytes, 0);
      EXPECT_EQ(cuda::TraitsOf(owned.attention).repack_bytes, expected.repack_bytes);
      EXPECT_EQ(cuda::RepackBytes(KernelId::kCudaFlashSm90, owned.attention),
                expected.repack_bytes);
      EXPECT_EQ(cuda::RepackBytes(KernelId::kCudaFlashSm80, owned.attention), 0);
    }
  }
}

TEST(CudaRepack, NoCopyIsMadeIfItWouldNotHelp) {
  ProblemSpec spec = MakeSpec(2, 4, 2, 33, 50, 64, 64, DType::kFloat16);
  spec.misaligned_elements = 1;
  EXPECT_GT(cuda::TraitsOf(MakeAttention(spec, 1).attention).repack_bytes, 0);
  const MemoryTraits paged = cuda::TraitsOf(MakeAttention(InPages(spec, 16), 1).attention);
  EXPECT_EQ(paged.repack_bytes, 0);
  EXPECT_THAT(std::string(paged.not_tma), testing::HasSubstr("16-byte"));
  spec.problem.has_bias = true;
  spec.bias_dtype = DType::kFloat16;
  EXPECT_EQ(cuda::TraitsOf(MakeAttention(spec, 1).attention).repack_bytes, 0)
      << "a row of the bias has 100 bytes";
  spec.bias_dtype = DType::kBit;
  EXPECT_GT(cuda::TraitsOf(MakeAttention(spec, 1).attention).repack_bytes, 0);
}

}  // namespace
}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// A sequence's bits are the same as alone: neither the batch, nor a longer neighbour, nor another
// session changes the order in which its keys are added up.

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr KernelId kFlashKernels[] = {KernelId::kCudaFlashFp32, KernelId::kCudaFlashSm80,
                                      KernelId::kCudaFlashSm90};
// D and Dv, one of each compiled head dim.
constexpr std::pair<int64_t, int64_t> kDims[] = {{64, 64},   {40, 64},   {96, 96},  {128, 128},
                                                 {192, 192}, {192, 128}, {256, 256}};

// Sequence b of `spec` as a separate problem over the same memory.
OwnedAttention Alone(const ProblemSpec& spec, uint64_t seed, int64_t b) {
  OwnedAttention alone = MakeAttention(spec, seed);
  Attention& a = alone.attention;
  const Sequence s = SequenceOf(a, b);
  const auto advance = [&](auto* view, int64_t row) {
    view->data = static_cast<char*>(const_cast<void*>(view->data)) +
                 (b * view->stride_b + row * view->stride_l) * DTypeBytes(a.problem.dtype);
  };
  advance(&a.q, s.q_row);
  advance(&a.o, s.q_row);
  a.lse += b * a.lse_stride_b + s.q_row;
  if (a.problem.page_rows > 0) {
    a.kv_pages.pages += b * a.kv_pages.stride;
  } else {
    advance(&a.k, s.k_row);
    advance(&a.v, s.k_row);
  }
  a.problem.packed = false;
  a.problem.batch = 1;
  a.problem.len_q = s.q_len;
  a.problem.len_k = s.k_len;
  a.kv_lengths = a.q_lengths = a.q_offsets = a.kv_offsets = nullptr;
  return alone;
}

// The first and the last sequence together with the others, and alone.
void ExpectAsAlone(const ProblemSpec& spec, KernelId kernel, uint64_t seed) {
  OwnedAttention together = MakeAttention(spec, seed);
  if (!CanRun(together.attention, kernel)) return;
  ASSERT_TRUE(RunOnDevice(&together, kernel).ok());
  const int64_t last = together.attention.problem.batch - 1;
  for (const int64_t b : {int64_t{0}, last}) {
    OwnedAttention alone = Alone(spec, seed, b);
    ASSERT_TRUE(CanRun(alone.attention, kernel));
    const int64_t rows = alone.attention.problem.len_q;
    const Status status = RunOnDevice(&alone, kernel);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(SameBits(Rows(together, b, rows), Rows(alone, 0, rows)))
        << "sequence " << b << " " << Label(spec, kernel, -1, seed);
  }
}

// Rows of all heads on either side of where a batch has few tiles: 132 of 128 rows for
// cuda_flash_sm80, 99 of 256 for cuda_flash_sm90. One sequence has few.
TEST(CudaAlone, TheBatchDoesNotChangeBits) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kRows = 66 * 32;  // an eighth of the former, a twelfth of the latter
  static_assert(8 * kRows == 132 * 128 && 12 * kRows == 99 * 256);
  for (const auto& [dim, dim_v] : kDims) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const int64_t batch : {8, 9, 11, 12}) {
        if (dim > 64 && batch < 12) continue;
        ProblemSpec spec = MakeSpec(batch, 32, 1, 66, 333, dim, dim_v, dtype);
        spec.problem.mask.right = batch % 2 == 0 ? 0 : -1;
        for (const float softcap : {0.0f, 3.0f}) {
          spec.problem.softcap = softcap;
          for (const KernelId kernel : kFlashKernels) {
            ASSERT_NO_FATAL_FAILURE(ExpectAsAlone(spec, kernel, seed));
          }
        }
      }
    }
  }
}

// Padded, packed and in pages: beside a much longer sequence.
TEST(CudaAlone, LongerNeighboursDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  constexpr std::pair<int64_t, int64_t> kLengths[] = {
      {600, 1500}, {1024, 1025}, {2047, 2048}, {8191, 9000}};
  for (const auto& [dim, dim_v] : kDims) {
    for (const auto& [shorter, longer] : kLengths) {
      if (longer > 3000 && dim != 128) continue;
      for (const int64_t right : {0, -1}) {
        ProblemSpec spec = MakeSpec(2, 4, 1, 200, longer, dim, dim_v,
                                    right == 0 ? DType::kFloat16 : DType::kBFloat16);
        spec.problem.mask.right = right;
        spec.q_lengths = {200, 200};
        spec.kv_lengths = {shorter, longer};
        ProblemSpec packed = spec;
        packed.problem.packed = true;
        for (const ProblemSpec& each : {spec, packed, InPages(spec, 64)}) {
          for (const KernelId kernel : kFlashKernels) {
            ASSERT_NO_FATAL_FAILURE(ExpectAsAlone(each, kernel, seed));
          }
        }
      }
    }
  }
}

// The reason: tiles among which the batch may choose add the same number of keys at a time.
TEST(CudaAlone, TilesWithEqualNumbersOfKeysGiveTheSameBits) {
  const uint64_t seed = FreshSeed();
  for (const auto& [dim, dim_v] : kDims) {
    for (int n = 0; n < 6; ++n) {
      ProblemSpec spec =
          MakeSpec(2, 6, 3, 333, 700, dim, dim_v, n % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
      if (n > 0) spec.problem.mask.right = 0;
      if (n == 2) spec.problem.mask.left = 150;
      if (n == 3) spec.problem.softcap = 20.0f;
      if (n == 4) spec.magnitude_q = 300;
      if (n == 5) spec.kv_lengths = {700, 129};
      spec.problem.has_sinks = n == 5;
      for (const KernelId kernel : {KernelId::kCudaFlashSm80, KernelId::kCudaFlashSm90}) {
        std::map<int, std::vector<std::byte>> first;  // by keys of a tile
        for (const int config : Configs(spec.problem, kernel)) {
          OwnedAttention owned = MakeAttention(spec, seed);
          if (!CanRun(owned.attention, kernel)) continue;
          ASSERT_TRUE(RunOnDevice(&owned, kernel, config).ok());
          const int keys = cuda::VariantsFor(kernel, spec.problem)[config].keys;
          const auto [at, is_first] = first.try_emplace(keys, owned.OutputBytes());
          EXPECT_TRUE(is_first || at->second == owned.OutputBytes())
              << Label(spec, kernel, config, seed);
        }
        // Hopper's are all of one kind.
        EXPECT_TRUE(kernel != KernelId::kCudaFlashSm90 || first.size() <= 1);
      }
    }
  }
}

}  // namespace
}  // namespace attend::test

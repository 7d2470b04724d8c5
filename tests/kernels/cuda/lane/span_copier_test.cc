// SPDX-License-Identifier: Apache-2.0
//
// Copies that a kernel does, and which memory it may do them with.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/lane/span_copier.h"
#include "kernels/cuda/runtime/copy_kernel.h"
#include "kernels/cuda/runtime/pinned_ranges.h"
#include "tests/kernels/support/lane_harness.h"

namespace attend::test {
namespace {

using cuda::CopyPiece;

// Pieces of any size and place in two blocks; bytes between them stay unchanged.
void CopyBetween(char* from, char* to, int64_t bytes, bool same_residue, std::mt19937_64& random,
                 std::vector<CopyPiece>* pieces) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t at = below(20), other = same_residue ? at : below(20);
  while (true) {
    const int64_t size = below(4) == 0 ? below(70000) : below(100);
    if (std::max(at, other) + size + 64 > bytes) return;
    pieces->push_back({to + other, from + at, size});
    at += size + below(40);
    other = same_residue ? at : other + size + below(40);
  }
}

TEST(CudaCopy, CopiesAnyPieces) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  constexpr int64_t kBytes = 3 << 20;
  const PinnedBlock source(kBytes, nullptr), sink(kBytes, nullptr);
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, kBytes), cudaSuccess);
  char* const device = static_cast<char*>(memory);
  size_t most = 0;
  for (int round = 0; round < 40; ++round) {
    for (int64_t n = 0; n < kBytes; ++n) source.get()[n] = static_cast<char>(random());
    std::memset(sink.get(), 7, kBytes);
    ASSERT_EQ(cudaMemset(device, 9, kBytes), cudaSuccess);
    std::vector<CopyPiece> in, out;
    CopyBetween(source.get(), device, kBytes, round % 2 == 0, random, &in);
    CopyBetween(device, sink.get(), kBytes, round % 4 < 2, random, &out);
    most = std::max(most, in.size());
    std::vector<char> on_device(kBytes, 9), back(kBytes, 7);
    for (const CopyPiece& piece : in) {
      std::copy_n(piece.from, piece.bytes, on_device.data() + (piece.to - device));
    }
    for (const CopyPiece& piece : out) {
      std::copy_n(on_device.data() + (piece.from - device), piece.bytes,
                  back.data() + (piece.to - sink.get()));
    }
    ASSERT_EQ(cuda::LaunchCopy(in, nullptr), cudaSuccess);
    ASSERT_EQ(cuda::LaunchCopy(out, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<char> seen(kBytes);
    ASSERT_EQ(cudaMemcpy(seen.data(), device, kBytes, cudaMemcpyDeviceToHost), cudaSuccess);
    ASSERT_TRUE(seen == on_device) << "in, round " << round << " seed " << seed;
    ASSERT_TRUE(std::equal(back.begin(), back.end(), sink.get()))
        << "out, round " << round << " seed " << seed;
  }
  EXPECT_GT(most, static_cast<size_t>(cuda::kCopyPiecesMax));
  const CopyPiece bad = {nullptr, source.get(), 8};
  EXPECT_EQ(cuda::LaunchCopy({&bad, 1}, nullptr), cudaErrorInvalidValue);
  (void)cudaFree(memory);
}

TEST(IsMapped, IsTrueForMemoryThatKernelsCanRead) {
  cuda::PinnedRanges ranges;
  const PinnedBlock known(1000, &ranges), unknown(1000, nullptr);
  std::vector<char> pageable(1000);
  const auto mapped = [&](char* data, int64_t bytes) {
    return cuda::IsMapped(ranges, {data, bytes});
  };
  EXPECT_TRUE(mapped(known.get(), 1000));
  EXPECT_TRUE(mapped(unknown.get(), 1000)) << "CUDA is asked";
  EXPECT_FALSE(mapped(pageable.data(), 1000));
  EXPECT_FALSE(mapped(nullptr, 1000));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error left for the next launch";
}

}  // namespace
}  // namespace attend::test

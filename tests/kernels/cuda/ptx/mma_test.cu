// SPDX-License-Identifier: Apache-2.0
//
// The Tensor Core wrappers of mma.cuh against a host model of the swizzle, of what ldmatrix gives
// to which lane, and of the fragments of a product.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "kernels/cuda/ptx/mma.cuh"
#include "tests/kernels/support/cuda_on_device.h"

// nvcc: a member of googletest's classes is never referenced.
#pragma nv_diag_suppress 177

namespace attend::cuda {
namespace {

constexpr int kLanes = 32;

template <int kDim>
void CheckSwizzle() {
  using Row = TileRow<kDim>;
  constexpr int kRows = 32;
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < Row::kChunks; ++chunk) {
      const int offset = Row::Offset(row, chunk);
      EXPECT_EQ(offset / Row::kBytes, row) << kDim;
      EXPECT_EQ(offset % 16, 0) << kDim;
      places.insert(offset);
    }
  }
  EXPECT_EQ(static_cast<int>(places.size()), kRows * Row::kChunks) << kDim;
  // The eight rows that ldmatrix reads at once lie in different banks.
  for (int first = 0; first < kRows; first += 8) {
    for (int chunk = 0; chunk < Row::kChunks; ++chunk) {
      std::set<int> banks;
      for (int row = first; row < first + 8; ++row) banks.insert(Row::Offset(row, chunk) % 128);
      EXPECT_EQ(banks.size(), 8u) << kDim << " chunk " << chunk;
    }
  }
}

TEST(CudaMma, SwizzleKeepsRowsAndSpreadsBanks) {
  CheckSwizzle<32>();
  CheckSwizzle<64>();
  CheckSwizzle<96>();
  CheckSwizzle<128>();
  CheckSwizzle<192>();
  CheckSwizzle<256>();
}

constexpr int kTileRows = 32;

// Fills a tile whose element (row, column) is row * kDim + column, then writes what ldmatrix gives
// of each 16 x 16 block: [way][row block][column block][lane][register].
template <int kDim>
__global__ void LoadBlocks(uint32_t* out) {
  using Row = TileRow<kDim>;
  __shared__ __align__(128) char tile[kTileRows * Row::kBytes];
  for (int n = threadIdx.x; n < kTileRows * kDim; n += kLanes) {
    const int row = n / kDim;
    const int column = n % kDim;
    *reinterpret_cast<uint16_t*>(tile + Row::Offset(row, column / 8) + column % 8 * 2) =
        static_cast<uint16_t>(n);
  }
  __syncwarp();
  const BlockOffsets<kDim> by_rows(Second::kRows);
  const BlockOffsets<kDim> by_columns(Second::kColumns);
  for (int way = 0; way < 3; ++way) {
#pragma unroll
    for (int i = 0; i < kTileRows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kDim / 16; ++j) {
        uint32_t r[4];
        if (way == 0) LoadMatrix(SharedAddress(tile) + by_rows.At(i, j), r);
        if (way == 1) LoadMatrix(SharedAddress(tile) + by_columns.At(i, j), r);
        if (way == 2) LoadMatrixTransposed(SharedAddress(tile) + by_rows.At(i, j), r);
        for (int e = 0; e < 4; ++e) out[4 * threadIdx.x + e] = r[e];
        out += 4 * kLanes;
      }
    }
  }
}

template <int kDim>
void CheckLoads() {
  OnDevice<uint32_t> out(std::vector<uint32_t>(3 * (kTileRows / 16) * (kDim / 16) * kLanes * 4));
  LoadBlocks<kDim><<<1, kLanes>>>(out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint32_t> got = out.Read();
  size_t n = 0;
  for (int way = 0; way < 3; ++way) {
    for (int i = 0; i < kTileRows / 16; ++i) {
      for (int j = 0; j < kDim / 16; ++j) {
        for (int lane = 0; lane < kLanes; ++lane) {
          for (int e = 0; e < 4; ++e, ++n) {
            const int down = way == 1 ? e / 2 : e % 2;
            const int right = way == 1 ? e % 2 : e / 2;
            const int major = lane / 4;
            const int minor = lane % 4 * 2;
            const int row = 16 * i + 8 * down + (way == 2 ? minor : major);
            const int column = 16 * j + 8 * right + (way == 2 ? major : minor);
            const int step = way == 2 ? kDim : 1;  // to the second of the pair
            const auto low = static_cast<uint32_t>(row * kDim + column);
            ASSERT_EQ(got[n], low | (low + step) << 16)
                << kDim << " way " << way << " block " << i << "," << j << " lane " << lane;
          }
        }
      }
    }
  }
}

TEST(CudaMma, LoadsGiveTheFragmentsOfEachBlock) {
  CheckLoads<32>();
  CheckLoads<64>();
  CheckLoads<96>();
  CheckLoads<128>();
  CheckLoads<192>();
  CheckLoads<256>();
}

constexpr int kGroups = 4;

// A warp copies kGroups times 32 chunks of 16 bytes, one group of copies each, and writes out the
// chunks it finds when at most kGroups - 1, ..., 0 groups are in flight: those of the first, the
// second, ... Lane l copies chunk l of its group if bit l of `valid` is set; otherwise it names
// `invalid`.
__global__ void CopyChunks(const uint4* in, const void* invalid, uint32_t valid, uint4* out) {
  using Row = TileRow<64>;
  __shared__ __align__(128) char tile[kGroups * kLanes * 16];
  const int lane = threadIdx.x;
  const auto offset = [lane](int group) {
    return Row::Offset(4 * group + lane / Row::kChunks, lane % Row::kChunks);
  };
  for (int group = 0; group < kGroups; ++group) {
    *reinterpret_cast<uint4*>(tile + offset(group)) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  __syncwarp();
  const bool mine = valid >> lane & 1;
  for (int group = 0; group < kGroups; ++group) {
    const void* from = mine ? in + group * kLanes + lane : invalid;
    CopyAsync16(SharedAddress(tile) + offset(group), from, mine);
    CommitCopies();
  }
  const auto write = [&](int group) {
    __syncwarp();
    // Other lanes' copies too, now that they have waited.
    const int other = lane ^ 5;
    const int at = Row::Offset(4 * group + other / Row::kChunks, other % Row::kChunks);
    out[group * kLanes + other] = *reinterpret_cast<const uint4*>(tile + at);
  };
  WaitCopyGroups<3>();
  write(0);
  WaitCopyGroups<2>();
  write(1);
  WaitCopyGroups<1>();
  write(2);
  WaitCopyGroups<0>();
  write(3);
}

// `far`: how far beyond the source lanes that copy nothing point.
void CheckCopies(uint32_t valid, int64_t far) {
  std::vector<uint4> values;
  for (uint32_t n = 0; n < kGroups * kLanes; ++n) {
    values.push_back(make_uint4(4 * n + 1, 4 * n + 2, 4 * n + 3, 4 * n + 4));
  }
  OnDevice<uint4> in(values), out(std::vector<uint4>(values.size()));
  const auto invalid = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(in.get()) + far);
  CopyChunks<<<1, kLanes>>>(in.get(), invalid, valid, out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint4> got = out.Read();
  for (int n = 0; n < kGroups * kLanes; ++n) {
    const bool copied = valid >> n % kLanes & 1;
    const uint4 expected = copied ? values[n] : make_uint4(0, 0, 0, 0);
    EXPECT_TRUE(got[n].x == expected.x && got[n].y == expected.y && got[n].z == expected.z &&
                got[n].w == expected.w)
        << "group " << n / kLanes << " lane " << n % kLanes << " valid " << valid;
  }
}

TEST(CudaMma, CopiesArriveGroupByGroupAndInvalidRowsAreZero) {
  for (const uint32_t valid : {0xffffffffu, 0u, 0x5a0ff0c3u, 1u}) CheckCopies(valid, 0);
  // Rows beyond a tensor may lie at unmapped addresses.
  for (const uint32_t valid : {0u, 0x5a0ff0c3u}) CheckCopies(valid, int64_t{1} << 38);
}

// Every lane stores 16 bytes, reads another's.
__global__ void StoreChunks(const uint4* in, uint4* out) {
  using Row = TileRow<64>;
  __shared__ __align__(128) char tile[kLanes * 16];
  const int lane = threadIdx.x;
  StoreShared16(SharedAddress(tile) + Row::Offset(lane / Row::kChunks, lane % Row::kChunks),
                in[lane]);
  __syncwarp();
  const int other = lane ^ 21;
  const int at = Row::Offset(other / Row::kChunks, other % Row::kChunks);
  out[other] = *reinterpret_cast<const uint4*>(tile + at);
}

TEST(CudaMma, SixteenBytesAreStoredInOrder) {
  std::vector<uint4> values;
  for (uint32_t n = 0; n < kLanes; ++n) {
    values.push_back(make_uint4(n, 0x10000 + n, 0x20000 + n, 0x30000 + n));
  }
  OnDevice<uint4> in(values), out{std::vector<uint4>(kLanes)};
  StoreChunks<<<1, kLanes>>>(in.get(), out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint4> got = out.Read();
  for (int n = 0; n < kLanes; ++n) {
    EXPECT_TRUE(got[n].x == values[n].x && got[n].y == values[n].y && got[n].z == values[n].z &&
                got[n].w == values[n].w)
        << n;
  }
}

// a: [16][16], b: [16][8], c: [16][8], all as float; computes a b into out[0] and c + a b into
// out[1], element by element through the fragments.
template <class Element>
__global__ void MultiplyBlock(const float* a, const float* b, const float* c, float* out) {
  const int row = threadIdx.x / 4;
  const int column = threadIdx.x % 4 * 2;
  uint32_t fa[4];
  for (int e = 0; e < 4; ++e) {
    const float* pair = a + (row + e % 2 * 8) * 16 + column + e / 2 * 8;
    fa[e] = Pack<Element>(pair[0], pair[1]);
  }
  uint32_t fb[2];
  for (int e = 0; e < 2; ++e) {
    const float* pair = b + (column + 8 * e) * 8 + row;
    fb[e] = Pack<Element>(pair[0], pair[8]);
  }
  float product[4];
  Multiply<Element>(product, fa, fb[0], fb[1]);
  float sum[4];
  for (int e = 0; e < 4; ++e) sum[e] = c[(row + e / 2 * 8) * 8 + column + e % 2];
  MultiplyAdd<Element>(sum, fa, fb[0], fb[1]);
  for (int e = 0; e < 4; ++e) {
    const int at = (row + e / 2 * 8) * 8 + column + e % 2;
    out[at] = product[e];
    out[128 + at] = sum[e];
  }
}

template <class Element>
void CheckProduct() {
  std::vector<float> a(256), b(128), c(128);  // small integers: all sums are exact
  for (int n = 0; n < 256; ++n) a[n] = static_cast<float>(n * 37 % 23 - 11);
  for (int n = 0; n < 128; ++n) b[n] = static_cast<float>(n * 53 % 19 - 9);
  for (int n = 0; n < 128; ++n) c[n] = static_cast<float>(n * 29 % 1001);
  OnDevice<float> da(a), db(b), dc(c), out(std::vector<float>(256));
  MultiplyBlock<Element><<<1, kLanes>>>(da.get(), db.get(), dc.get(), out.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> got = out.Read();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[k * 8 + j];
      EXPECT_EQ(got[i * 8 + j], sum) << i << "," << j;
      EXPECT_EQ(got[128 + i * 8 + j], c[i * 8 + j] + sum) << i << "," << j;
    }
  }
}

TEST(CudaMma, ProductsEqualMatrixProducts) {
  CheckProduct<__half>();
  CheckProduct<__nv_bfloat16>();
}

// For each pair: packed and unpacked again, and which halves are not finite.
template <class Element>
__global__ void PackPairs(const float2* pairs, float2* unpacked, uint32_t* marks) {
  const uint32_t packed = Pack<Element>(pairs[threadIdx.x].x, pairs[threadIdx.x].y);
  unpacked[threadIdx.x] = Unpack<Element>(packed);
  marks[threadIdx.x] = NonFinitePair<Element>(packed);
}

template <class Element>
void CheckPairs() {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {0.0f, -0.0f, 1.5f, -3.0f, 65280.0f, 0x1p-14f, inf, -inf, nan};
  std::vector<float2> pairs;
  for (const float low : values) {
    for (const float high : values) pairs.push_back(make_float2(low, high));
  }
  OnDevice<float2> in(pairs), unpacked(pairs);
  OnDevice<uint32_t> marks(std::vector<uint32_t>(pairs.size()));
  PackPairs<Element>
      <<<1, static_cast<unsigned>(pairs.size())>>>(in.get(), unpacked.get(), marks.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float2> got = unpacked.Read();
  const std::vector<uint32_t> got_marks = marks.Read();
  const auto same = [](float x, float y) {
    return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
  };
  for (size_t n = 0; n < pairs.size(); ++n) {
    EXPECT_TRUE(same(pairs[n].x, got[n].x) && same(pairs[n].y, got[n].y)) << n;
    const uint32_t expected =
        (std::isfinite(pairs[n].x) ? 0 : 0x8000u) | (std::isfinite(pairs[n].y) ? 0 : 0x80000000u);
    EXPECT_EQ(got_marks[n], expected) << n;
  }
}

TEST(CudaMma, PairsKeepTheirValuesAndReportNonFiniteOnes) {
  CheckPairs<__half>();
  CheckPairs<__nv_bfloat16>();
}

}  // namespace
}  // namespace attend::cuda

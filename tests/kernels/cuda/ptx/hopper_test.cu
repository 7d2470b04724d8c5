// SPDX-License-Identifier: Apache-2.0
//
// Hopper's copy engine, mbarriers and named barriers (hopper.cuh), and the engine's view of tensors
// (tensor_maps.h), against a host model of a box in shared memory.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/ptx/hopper.cuh"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "tests/kernels/support/cuda_hopper_model.cuh"
#include "tests/kernels/support/cuda_on_device.h"

// nvcc: a member of googletest's classes is never referenced.
#pragma nv_diag_suppress 177

namespace attend::cuda {
namespace {

class CudaHopper : public HopperTest {};

constexpr int kThreads = 128;

// ---- tensors ------------------------------------------------------------------------------------

// Q as [B, L, H, D] with a gap behind every head's row; K dense; V with a single head that is used
// for all of K's; O with gaps everywhere.
constexpr Tensor kQ = {2, 6, 37, 72, 37 * 480 + 8, 80, 480};
constexpr Tensor kK = {2, 3, 53, 72, 3 * 53 * 72, 53 * 72, 72};
constexpr Tensor kV = {2, 1, 53, 40, 53 * 48, 0, 48};
constexpr Tensor kO = {2, 6, 37, 40, 6 * (37 * 48 + 8) + 16, 37 * 48 + 8, 48};

// kQ to kO on the device, and their tensor maps.
struct Described {
  OnDevice<uint16_t> q{kQ.Elements()}, k{kK.Elements()}, v{kV.Elements()}, o{kO.Elements()};
  TensorMaps maps;
  cudaError_t error;

  Described(DType dtype, const TensorBoxes& boxes) {
    Attention a;
    a.problem.dtype = dtype;
    a.problem.batch = kQ.batch;
    a.problem.heads_q = kQ.heads;
    a.problem.heads_kv = kK.heads;
    a.problem.len_q = kQ.rows;
    a.problem.len_k = kK.rows;
    a.problem.dim = kQ.dim;
    a.problem.dim_v = kV.dim;
    a.q = kQ.View(q.get());
    a.k = kK.View(k.get());
    a.v = kV.View(v.get());
    a.o = {o.get(), kO.stride_b, kO.stride_h, kO.stride_l};
    EXPECT_TRUE(TmaAligned(a));
    error = EncodeTensorMaps(a, boxes, &maps);
  }
};

// ---- loads --------------------------------------------------------------------------------------

// Loads the boxes at all places to the same shared memory, through one barrier, and writes out what
// lies there after each.
__global__ void LoadBoxes(const __grid_constant__ CUtensorMap map, const Place* places, int count,
                          int bytes, uint4* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  char* shared = AlignedShared();
  __shared__ Barrier barrier;
  const uint32_t full = SharedAddress(&barrier);
  if (threadIdx.x == 0) {
    InitBarrier(full, 1);
    FenceBarrierInit();
  }
  for (int n = 0; n < count; ++n) {
    FillShared(shared, bytes);
    if (threadIdx.x == 0) {
      const Place at = places[n];
      ArriveExpecting(full, bytes);
      LoadBox(&map, SharedAddress(shared), full, at.col, at.row, at.h, at.b,
              n % 2 == 0 ? CachePolicy::kEvictFirst : CachePolicy::kEvictLast);
    }
    Wait(full, n % 2);
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
      out[n * (bytes / 16) + i] = reinterpret_cast<const uint4*>(shared)[i];
    }
    __syncthreads();
  }
#endif
}

void CheckLoads(const Tensor& tensor, const CUtensorMap& map, const TensorBox& box) {
  const int last = tensor.rows - 1;
  const std::vector<Place> places = {
      {0, 0, 0, 0},                 // the tensor's beginning
      {32, 5, 1, 1},                // in its middle
      {8, 3, 2, 0},                 // columns that no kernel begins with
      {0, last - 2, 0, 1},          // rows run beyond its end
      {64, 1, 0, 1},                // columns do, where they begin inside
      {32, last, 0, 1},             // both
      {0, tensor.rows, 0, 0},       // all of it outside
      {0, -3, 0, 1},                // begins before the first row
      {0, 0, tensor.heads, 0},      // no such head
      {0, 0, 0, tensor.batch},      // no such sequence
      {0, 2, tensor.heads - 1, 1},  // the last head
  };
  const int count = static_cast<int>(places.size());
  const int bytes = 2 * box.rows * box.cols;
  OnDevice<Place> on_device(places);
  OnDevice<uint16_t> out(std::vector<uint16_t>(count * box.rows * box.cols));
  LoadBoxes<<<1, kThreads, kAlignmentBytes + bytes>>>(map, on_device.get(), count, bytes,
                                                      reinterpret_cast<uint4*>(out.get()));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> got = out.Read();
  for (int n = 0; n < count; ++n) {
    const std::vector<uint16_t> expected = ExpectedBox(tensor, box, places[n]);
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), got.begin() + n * expected.size()))
        << box.rows << " x " << box.cols << " at " << Name(places[n]);
  }
}

TEST_F(CudaHopper, BoxesArriveSwizzledWithZerosBeyondTheTensor) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int cols : {64, 32}) {
      const TensorBoxes boxes = {{64, cols}, {80, cols}, {16, cols}, {}};
      Described described(dtype, boxes);
      ASSERT_EQ(described.error, cudaSuccess);
      EXPECT_FALSE(described.maps.writes_o);  // no box was named for it
      CheckLoads(kQ, described.maps.q, boxes.q);
      CheckLoads(kK, described.maps.k, boxes.k);
      CheckLoads(kV, described.maps.v, boxes.v);
    }
  }
}

// ---- maps in memory -----------------------------------------------------------------------------

// Every block loads the box at `at` through a map that lies in global memory.
__global__ void LoadThroughMemory(const CUtensorMap* map, Place at, int bytes, uint4* out) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  char* shared = AlignedShared();
  __shared__ Barrier barrier;
  const uint32_t full = SharedAddress(&barrier);
  if (threadIdx.x == 0) {
    InitBarrier(full, 1);
    FenceBarrierInit();
  }
  FillShared(shared, bytes);
  if (threadIdx.x == 0) {
    AcquireTensorMap(map);
    ArriveExpecting(full, bytes);
    LoadBox(map, SharedAddress(shared), full, at.col, at.row, at.h, at.b, CachePolicy::kEvictFirst);
  }
  Wait(full, 0);
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    out[blockIdx.x * (bytes / 16) + i] = reinterpret_cast<const uint4*>(shared)[i];
  }
#endif
}

// As when a list of attentions is launched: each launch writes its maps over those of the last one,
// which multiprocessors may still have cached.
TEST_F(CudaHopper, AMapRewrittenInPlaceIsSeenByTheNextLaunch) {
  const TensorBox box = {16, 64};
  const Place at = {0, 5, 1, 1};
  Described described(DType::kFloat16, {box, box, box, {}});
  ASSERT_EQ(described.error, cudaSuccess);
  const std::vector<uint16_t> expected[] = {ExpectedBox(kQ, box, at), ExpectedBox(kK, box, at)};
  ASSERT_NE(expected[0], expected[1]);
  const CUtensorMap* maps[] = {&described.maps.q, &described.maps.k};
  OnDevice<CUtensorMap> place(std::vector<CUtensorMap>(1));
  constexpr int kBytes = 2 * 16 * 64;
  constexpr int kBlocks = 300;  // some for every multiprocessor
  constexpr int kLaunches = 20;
  constexpr int kElements = kBlocks * kBytes / 2;  // of a launch
  OnDevice<uint16_t> out(std::vector<uint16_t>(kLaunches * kElements));
  for (int n = 0; n < kLaunches; ++n) {
    ASSERT_EQ(cudaMemcpyAsync(place.get(), maps[n % 2], sizeof(CUtensorMap), cudaMemcpyHostToDevice,
                              nullptr),
              cudaSuccess);
    LoadThroughMemory<<<kBlocks, kThreads, kAlignmentBytes + kBytes>>>(
        place.get(), at, kBytes, reinterpret_cast<uint4*>(out.get() + n * kElements));
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> got = out.Read();
  for (int n = 0; n < kLaunches * kBlocks; ++n) {
    const std::vector<uint16_t>& box_expected = expected[n / kBlocks % 2];
    ASSERT_TRUE(std::equal(box_expected.begin(), box_expected.end(),
                           got.begin() + n * static_cast<int64_t>(box_expected.size())))
        << "launch " << n / kBlocks << " block " << n % kBlocks;
  }
}

// ---- phases -------------------------------------------------------------------------------------

// The condition that Wait waits for, without waiting.
__device__ __forceinline__ int Ended(uint32_t barrier, uint32_t parity) {
  int ended;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.b32 %0, 1, 0, p;}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended;
}

// One thread takes a barrier of two arrivals through two phases, the first of which also waits for
// two boxes, and records which have ended at each step.
__global__ void WatchPhases(const __grid_constant__ CUtensorMap map, int bytes, int* ended) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ Barrier memory;
  const uint32_t barrier = SharedAddress(&memory);
  const uint32_t box = SharedAddress(AlignedShared());
  InitBarrier(barrier, 2);
  FenceBarrierInit();
  ended[0] = Ended(barrier, 1);
  ended[1] = Ended(barrier, 0);
  ArriveExpecting(barrier, 2 * bytes);
  PrefetchTensorMap(&map);
  LoadBox(&map, box, barrier, 0, 0, 0, 0, CachePolicy::kEvictLast);
  // By then the box has arrived, but the second arrival is missing.
  for (int n = 0; n < 10; ++n) __nanosleep(20000);
  ended[2] = Ended(barrier, 0);
  Arrive(barrier);
  ended[3] = Ended(barrier, 0);
  LoadBox(&map, box + bytes, barrier, 0, 1 << 20, 0, 0, CachePolicy::kEvictLast);
  Wait(barrier, 0);
  ended[4] = Ended(barrier, 0);
  ended[5] = Ended(barrier, 1);
  Arrive(barrier);
  ended[6] = Ended(barrier, 1);
  Arrive(barrier);
  Wait(barrier, 1);
  ended[7] = Ended(barrier, 1);
  ended[8] = Ended(barrier, 0);
#endif
}

TEST_F(CudaHopper, PhasesEndWithTheirArrivalsAndBytes) {
  const TensorBox box = {64, 64};
  Described described(DType::kFloat16, {box, box, box, {}});
  ASSERT_EQ(described.error, cudaSuccess);
  const int bytes = 2 * box.rows * box.cols;
  OnDevice<int> ended(std::vector<int>(9, -1));
  WatchPhases<<<1, 1, kAlignmentBytes + 2 * bytes>>>(described.maps.q, bytes, ended.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(ended.Read(), (std::vector<int>{1, 0, 0, 0, 1, 0, 0, 1, 0}));
}

// ---- stores -------------------------------------------------------------------------------------

constexpr int kStoredRows = 64;

uint16_t StoredElement(int row, int col) { return static_cast<uint16_t>(0x8000 + 64 * row + col); }

// A warpgroup writes elements 0x8000 + 64 * row + col into a box as it would its results, copies
// the box to `image` and lets the copy engine store it at `at`.
template <int kCols>
__global__ void StoreOneBox(const __grid_constant__ CUtensorMap map, Place at, uint16_t* image) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBytes = 2 * kStoredRows * kCols;
  char* shared = AlignedShared();
  FillShared(shared, kBytes);
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x / 32 * 16;  // of the warp's 16 rows
  for (int col = 0; col < kCols; col += 16) {
    uint32_t x[4];  // the matrices: upper left, lower left, upper right, lower right
    for (int m = 0; m < 4; ++m) {
      const int row = first + m % 2 * 8 + lane / 4;
      const uint32_t low = 0x8000 + 64 * row + col + m / 2 * 8 + 2 * (lane % 4);
      x[m] = low | (low + 1) << 16;
    }
    const int row = first + lane % 16;  // lanes 8 to 15 name the second matrix's rows
    StoreMatrices(SharedAddress(shared) + BoxOffset(kCols, row, col + lane / 16 * 8), x);
  }
  FenceAsyncProxy();
  SyncNamed(1, kThreads);
  for (int i = threadIdx.x; i < kBytes / 2; i += kThreads) {
    image[i] = reinterpret_cast<const uint16_t*>(shared)[i];
  }
  if (threadIdx.x == 0) {
    StoreBox(&map, SharedAddress(shared), at.col, at.row, at.h, at.b);
    CommitStores();
    WaitStoresRead();
  }
  __syncthreads();
  FillShared(shared, kBytes);  // too late to be stored
  if (threadIdx.x == 0) WaitStores();
#endif
}

template <int kCols>
void CheckStore(const Place& at) {
  const TensorBox box = {kStoredRows, kCols};
  Described described(DType::kBFloat16, {box, box, box, box});
  ASSERT_EQ(described.error, cudaSuccess);
  ASSERT_TRUE(described.maps.writes_o);
  OnDevice<uint16_t> image(std::vector<uint16_t>(kStoredRows * kCols));
  StoreOneBox<kCols><<<1, kThreads, kAlignmentBytes + 2 * kStoredRows * kCols>>>(described.maps.o,
                                                                                 at, image.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint16_t> got_image = image.Read();
  std::vector<uint16_t> expected = kO.Elements();
  for (int row = 0; row < kStoredRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      ASSERT_EQ(got_image[BoxOffset(kCols, row, col) / 2], StoredElement(row, col))
          << kCols << " columns, " << row << "," << col;
      const Place to = {at.col + col, at.row + row, at.h, at.b};
      if (kO.Has(to)) expected[kO.Index(to)] = StoredElement(row, col);
    }
  }
  EXPECT_TRUE(described.o.Read() == expected) << kCols << " columns at " << Name(at);
}

TEST_F(CudaHopper, StoresEndAtTheTensorsBounds) {
  for (const int row : {0, 5, kO.rows - 1, kO.rows}) {
    CheckStore<64>({0, row, 3, 1});
    CheckStore<32>({0, row, 0, 0});
    CheckStore<32>({32, row, 5, 1});  // 8 columns of it inside
  }
}

// ---- hand-over ----------------------------------------------------------------------------------

constexpr int kRounds = 1000;

// The value that thread `t` of the writers passes on in a round.
__host__ __device__ inline uint32_t Given(int round, int t) { return round * 2654435761u + t; }

// The first warpgroup passes kRounds lots of one value per thread to the second, through a place
// for one lot (named barriers) or two (mbarriers); the second adds up the values that it reads.
// Each is ahead of the other in turn.
template <bool kNamed>
__global__ void HandOver(uint32_t* sums) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kPlaces = kNamed ? 1 : 2;
  __shared__ uint32_t lots[kPlaces][kThreads];
  __shared__ Barrier full[kPlaces], empty[kPlaces];
  if (threadIdx.x == 0) {
    for (int n = 0; n < kPlaces; ++n) {
      InitBarrier(SharedAddress(&full[n]), kThreads);
      InitBarrier(SharedAddress(&empty[n]), kThreads);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const int t = threadIdx.x % kThreads;
  const bool writes = threadIdx.x < kThreads;
  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    const int place = round % kPlaces;
    const uint32_t parity = round / kPlaces % 2;
    if (round % 16 == (writes ? 3 : 11)) __nanosleep(500 + 10 * t);
    if (writes) {
      if (kNamed && round > 0) SyncNamed(2, 2 * kThreads);
      if (!kNamed) Wait(SharedAddress(&empty[place]), parity ^ 1);
      lots[place][t] = Given(round, t);
      if (kNamed) ArriveNamed(1, 2 * kThreads);
      if (!kNamed) Arrive(SharedAddress(&full[place]));
    } else {
      if (kNamed) SyncNamed(1, 2 * kThreads);
      if (!kNamed) Wait(SharedAddress(&full[place]), parity);
      sum = 31 * sum + lots[place][kThreads - 1 - t];
      // No thread waits after the last one.
      if (kNamed && round + 1 < kRounds) ArriveNamed(2, 2 * kThreads);
      if (!kNamed) Arrive(SharedAddress(&empty[place]));
    }
  }
  if (!writes) sums[t] = sum;
#endif
}

template <bool kNamed>
void CheckHandOver() {
  OnDevice<uint32_t> sums(std::vector<uint32_t>(kThreads, 0));
  HandOver<kNamed><<<1, 2 * kThreads>>>(sums.get());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<uint32_t> got = sums.Read();
  for (int t = 0; t < kThreads; ++t) {
    uint32_t sum = 0;
    for (int round = 0; round < kRounds; ++round) sum = 31 * sum + Given(round, kThreads - 1 - t);
    EXPECT_EQ(got[t], sum) << t;
  }
}

TEST_F(CudaHopper, NamedBarriersHandOver) { CheckHandOver<true>(); }
TEST_F(CudaHopper, BarriersHandOver) { CheckHandOver<false>(); }

}  // namespace
}  // namespace attend::cuda

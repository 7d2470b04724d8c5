// SPDX-License-Identifier: Apache-2.0
//
// The GPU's backward pass with many heads, with only some of the gradients, with rows that heads
// share, and beside another pass.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "kernels/contract/dtype.h"
#include "kernels/cuda/backward/backward.h"
#include "kernels/reference/check_gradients.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// ---- sections of heads --------------------------------------------------------------------------

// |got - want| / |want| over one head of a contiguous gradient; NaN if there is one.
double Distance(const TensorView& got, const TensorView& want, DType dtype, int64_t head,
                int64_t elements) {
  double off = 0, size = 0;
  for (int64_t n = 0; n < elements; ++n) {
    const double x = LoadElement(got.data, dtype, head * got.stride_h + n);
    const double y = LoadElement(want.data, dtype, head * want.stride_h + n);
    off += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(off / size);
}

// For one sequence without lengths. Two correct gradients differ by the rounding of P or dS in one
// of them, and by the rounding of either's result: each u of its terms, whose signs are random, so
// that a gradient is not smaller than the root of their squares. The fourth u covers fp32's
// rounding and subnormal numbers. Rounding alone came to 0.7 u in all of the shapes below; one
// ordinary row of 5210 swapped with another, to 36 u.
void ExpectClose(const Problem& p, const Gradients& got, const Gradients& want) {
  const double bound = 4 * UnitRoundoff(p.dtype);
  for (int64_t h = 0; h < p.heads_q; ++h) {
    EXPECT_LE(Distance(got.d_q, want.d_q, p.dtype, h, p.len_q * p.dim), bound) << "dQ, head " << h;
  }
  for (int64_t h = 0; h < p.heads_kv; ++h) {
    EXPECT_LE(Distance(got.d_k, want.d_k, p.dtype, h, p.len_k * p.dim), bound) << "dK, head " << h;
    EXPECT_LE(Distance(got.d_v, want.d_v, p.dtype, h, p.len_k * p.dim_v), bound)
        << "dV, head " << h;
  }
}

// All elements against those of fp32, and some rows of each against the definition.
void ExpectAllClose(const ProblemSpec& spec, uint64_t seed) {
  SCOPED_TRACE(Describe(spec) + " ATTEND_TEST_SEED=" + std::to_string(seed));
  ExpectTaken(KernelId::kCudaFlashSm80, spec, seed, true);
  ExpectTaken(KernelId::kCudaFlashSm90, spec, seed, true);
  OwnedAttention owned = MakeAttention(spec, seed);
  const Attention& a = owned.attention;
  const Status forward = RunOnDevice(&owned, KernelId::kCudaFlashFp32);
  ASSERT_TRUE(forward.ok()) << forward.ToString();
  OwnedGradients want(a, seed + 1);
  for (const Way& way : kWays) {
    SCOPED_TRACE(NameOf(way));
    const bool first = &way == kWays;
    OwnedGradients own(a, seed + 1);
    OwnedGradients& got = first ? want : own;
    if (!Takes(way, a, got.get())) continue;
    const Status status = RunBackward(&owned, &got, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const RowsReport report = CheckGradients(a, got.get(), seed, 5e7);
    EXPECT_TRUE(report.ok) << report.detail;
    if (!first) ExpectClose(a.problem, got.get(), want.get());
  }
}

// More heads than are computed side by side. Heads of 4160 rows fill the two kernels' and the
// turns' share of the L2 cache before the 20th; mma.sync's under a mask need longer ones, and many
// tiles. The last shape is under a mask only.
TEST(CudaBackward, HeadsOfSeveralSectionsAreRight) {
  const uint64_t seed = FreshSeed();
  for (const bool causal : {false, true}) {
    for (const auto& [len_q, len_k] : {std::pair{4160, 130}, {130, 4160}, {3210, 5210}}) {
      if (len_q == 3210 && !causal) continue;
      ProblemSpec spec = MakeSpec(1, 20, 20, len_q, len_k, 64, 64, DType::kFloat16);
      if (causal) {
        spec.problem.mask.right = 0;
        // All rows see some keys.
        if (len_q > len_k) spec.problem.mask.alignment = Alignment::kTopLeft;
      }
      ExpectAllClose(spec, seed);
    }
  }
}

// ---- what all kernels should have computed ------------------------------------------------------

constexpr std::pair<int64_t, int64_t> kDims[] = {{64, 64}, {128, 64}};

TEST(CudaBackward, ABiasSharedByAllIsSummedOverAll) {
  const uint64_t seed = FreshSeed();
  for (const bool per_query : {false, true}) {
    const auto expect = [&](ProblemSpec spec) {
      spec.problem.has_bias = true;
      spec.bias_per_sequence = spec.bias_per_head = false;
      spec.bias_per_query = per_query;
      for (const ProblemSpec& each : {spec, WithDropout(spec, seed)}) {
        if (spec.problem.dtype != DType::kFloat32) {
          ExpectTaken(KernelId::kCudaFlashSm80, each, seed, true);
        }
        ExpectSpecRight(each, seed);
      }
    };
    ProblemSpec longer = MakeSpec(3, 4, 2, 300, 650, 8, 8);
    longer.q_lengths = {300, 0, 270};
    longer.kv_lengths = {20, 650, 600};
    expect(longer);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const auto& [dim, dim_v] : kDims) {
        ProblemSpec spec = MakeSpec(3, 4, 2, 130, 200, dim, dim_v, dtype);
        spec.q_lengths = {130, 0, 100};
        spec.kv_lengths = {20, 200, 180};
        expect(spec);
      }
    }
  }
}

TEST(CudaBackward, EmptySequencesAmongOthersAreRight) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const auto& [dim, dim_v] : {std::pair{24, 16}, {64, 64}, {128, 64}}) {
      ProblemSpec spec = MakeSpec(0, 4, 2, 0, 0, dim, dim_v, dtype);
      spec.problem.packed = true;
      spec.q_lengths = {5, 0, 70, 3, 0, 9};
      spec.kv_lengths = {0, 7, 130, 0, 0, 2};
      const bool tensor_cores = dtype != DType::kFloat32;
      ExpectTaken(KernelId::kCudaFlashSm80, spec, seed, tensor_cores);
      ExpectTaken(KernelId::kCudaFlashSm90, spec, seed, tensor_cores);
      ExpectSpecRight(spec, seed);
    }
  }
}

// ---- some of the gradients ----------------------------------------------------------------------

struct Wanted {
  const char* what;
  bool d_q = false, d_k = false, d_v = false, d_bias = false, d_sinks = false;
};
// Each alone, and dQ with one of those that the same kernel leaves out.
constexpr Wanted kWanted[] = {{.what = "dQ", .d_q = true},
                              {.what = "dK", .d_k = true},
                              {.what = "dV", .d_v = true},
                              {.what = "dBias", .d_bias = true},
                              {.what = "dSinks", .d_sinks = true},
                              {.what = "dQ and dK", .d_q = true, .d_k = true},
                              {.what = "dQ and dV", .d_q = true, .d_v = true}};

void KeepOnly(const Wanted& wanted, Gradients* g) {
  if (!wanted.d_q) g->d_q.data = nullptr;
  if (!wanted.d_k) g->d_k.data = nullptr;
  if (!wanted.d_v) g->d_v.data = nullptr;
  if (!wanted.d_bias) g->d_bias.data = nullptr;
  if (!wanted.d_sinks) g->d_sinks = nullptr;
}

// Bits may differ from those of all gradients together, as other kernels may run, but are always
// the same.
void ExpectSome(OwnedAttention* owned, const Way& way, const GradientsJudge& judge,
                const Wanted& wanted, uint64_t seed) {
  SCOPED_TRACE(std::string("only ") + wanted.what);
  std::vector<std::byte> first;
  for (int n = 0; n < 3; ++n) {
    OwnedGradients gradients(owned->attention, seed);
    KeepOnly(wanted, &gradients.get());
    const Status status = RunBackward(owned, &gradients, way);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(judge.Fault(gradients.get()), "");
    EXPECT_TRUE(gradients.GuardsIntact()) << "wrote outside its rows";
    if (n == 0) first = gradients.Bytes();
    EXPECT_EQ(gradients.Bytes(), first) << "run " << n;
  }
}

void ExpectNoLseGradientIsZero(OwnedAttention* owned, const Way& way, uint64_t seed) {
  const Attention& a = owned->attention;
  OwnedGradients zero(a, seed), none(a, seed);
  for (OwnedGradients* each : {&zero, &none}) {
    std::fill_n(const_cast<float*>(each->get().d_lse), a.problem.heads_q * a.lse_stride_h, 0.0f);
  }
  none.get().d_lse = nullptr;
  ExpectRight(owned, &none, way);
  const Status status = RunBackward(owned, &zero, way);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(none.Bytes(), zero.Bytes()) << "without d_lse";
}

TEST(CudaBackward, AnySubsetOfTheGradientsIsRight) {
  const uint64_t seed = FreshSeed();
  for (const auto& [dim, dim_v] : {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}}) {
    for (const bool has_bias : {false, true}) {
      ProblemSpec spec = MakeSpec(1, 4, 2, 70, 140, dim, dim_v, DType::kFloat16);
      spec.problem.has_sinks = true;
      spec.problem.has_bias = has_bias;
      spec.problem.mask.right = 0;
      SCOPED_TRACE(Describe(spec) + " ATTEND_TEST_SEED=" + std::to_string(seed));
      ExpectTaken(KernelId::kCudaFlashSm80, spec, seed, true);
      ExpectTaken(KernelId::kCudaFlashSm90, spec, seed, !has_bias);
      OwnedAttention owned = MakeAttention(spec, seed);
      CpuReference(owned.attention);
      for (const Way& way : kWays) {
        SCOPED_TRACE(NameOf(way));
        const OwnedGradients all(owned.attention, seed);
        if (!Takes(way, owned.attention, all.get())) continue;
        const GradientsJudge judge(owned.attention, all.get(), FactorsOf(way, spec.problem));
        for (const Wanted& wanted : kWanted) {
          if (has_bias || !wanted.d_bias) ExpectSome(&owned, way, judge, wanted, seed);
        }
        ExpectNoLseGradientIsZero(&owned, way, seed);
      }
    }
  }
}

// ---- values and strides -------------------------------------------------------------------------

// At 1e4 dS nears fp16's end; at 1e-4 dO and dS are among its subnormal numbers.
TEST(CudaBackward, ExtremeMagnitudesOfFloat16AreRight) {
  const uint64_t seed = FreshSeed();
  for (const auto& [dim, dim_v] : kDims) {
    const ProblemSpec spec = MakeSpec(1, 4, 2, 100, 130, dim, dim_v, DType::kFloat16);
    ExpectTaken(KernelId::kCudaFlashSm90, spec, seed, true);
    OwnedAttention owned = MakeAttention(spec, seed);
    const Attention& a = owned.attention;
    CpuReference(a);
    for (const float factor : {1e4f, 1e-4f}) {
      SCOPED_TRACE("dO * " + std::to_string(factor) + " ATTEND_TEST_SEED=" + std::to_string(seed));
      for (const Way& way : kWays) {
        OwnedGradients gradients(a, seed + 1);
        const Gradients& g = gradients.get();
        auto* const d_o = const_cast<void*>(g.d_o.data);
        for (int64_t n = 0; n < 4 * g.d_o.stride_h; ++n) {
          StoreElement(d_o, DType::kFloat16, n, factor * LoadElement(d_o, DType::kFloat16, n));
        }
        auto* const d_lse = const_cast<float*>(g.d_lse);
        for (int64_t n = 0; n < 4 * a.lse_stride_h; ++n) d_lse[n] *= factor;
        ExpectRight(&owned, &gradients, way);
      }
    }
  }
}

// K, V and dO of one head stand for those of all.
TEST(CudaBackward, BroadcastHeadsAreRight) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
    for (const auto& [dim, dim_v] : kDims) {
      const ProblemSpec spec = MakeSpec(2, 4, 2, 100, 150, dim, dim_v, dtype);
      SCOPED_TRACE(Describe(spec) + " ATTEND_TEST_SEED=" + std::to_string(seed));
      const OwnedAttention whole = MakeAttention(spec, seed);  // whose strides gradients have
      OwnedAttention owned = MakeAttention(spec, seed);
      owned.attention.k.stride_h = owned.attention.v.stride_h = 0;
      CpuReference(owned.attention);
      for (const Way& way : kWays) {
        OwnedGradients gradients(whole.attention, seed + 1);
        gradients.get().d_o.stride_h = 0;
        ExpectRight(&owned, &gradients, way);
      }
    }
  }
}

// ---- two passes at once -------------------------------------------------------------------------

class Stream {
 public:
  Stream() { (void)cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Two passes with more blocks than fit the device, many times: neither may prevent blocks of the
// other from running that its own blocks wait for, nor touch its counters.
TEST(CudaBackward, TwoStreamsDoNotBlockEachOther) {
  const uint64_t seed = FreshSeed();
  const ProblemSpec spec = MakeSpec(1, 8, 8, 500, 3000, 64, 64, DType::kFloat16);
  std::vector<OwnedAttention> owned;
  for (uint64_t n = 0; n < 2; ++n) {
    owned.push_back(MakeAttention(spec, seed + n));
    ASSERT_TRUE(RunOnDevice(&owned.back(), KernelId::kCudaFlashFp32).ok());
  }
  for (const Way& way : kWays) {
    SCOPED_TRACE(NameOf(way) + " ATTEND_TEST_SEED=" + std::to_string(seed));
    std::array<OwnedGradients, 2> alone = {OwnedGradients(owned[0].attention, seed),
                                           OwnedGradients(owned[1].attention, seed + 1)};
    if (!Takes(way, owned[0].attention, alone[0].get())) continue;
    std::array<OwnedGradients, 2> both = {OwnedGradients(owned[0].attention, seed),
                                          OwnedGradients(owned[1].attention, seed + 1)};
    for (size_t n = 0; n < 2; ++n) ASSERT_TRUE(RunBackward(&owned[n], &alone[n], way).ok());
    ASSERT_NE(alone[0].Bytes(), alone[1].Bytes());
    const Stream streams[2];
    BackwardRun runs[] = {{&owned[0], &both[0], way}, {&owned[1], &both[1], way}};
    for (BackwardRun& run : runs) ASSERT_TRUE(run.Prepare().ok());
    for (int n = 0; n < 40; ++n) {
      ASSERT_TRUE(runs[n % 2].Launch(streams[n % 2].get()).ok());
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (size_t n = 0; n < 2; ++n) {
      ASSERT_TRUE(runs[n].Fetch().ok());
      EXPECT_EQ(both[n].Bytes(), alone[n].Bytes()) << "pass " << n;
    }
  }
}

}  // namespace
}  // namespace attend::test

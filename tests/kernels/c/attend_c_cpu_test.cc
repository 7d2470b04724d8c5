// SPDX-License-Identifier: Apache-2.0
//
// The C ABI on the CPU, forward and backward: the bits of the C++ interface, host memory, and
// refusals that change nothing. Runs without a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/c/attend_c.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/reference/cpu_reference.h"
#include "kernels/reference/reference_gradients.h"
#include "tests/kernels/support/c_params.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

ProblemSpec CSpec(uint64_t seed) {
  ProblemSpec spec = RandomKernelSpec(seed, 2e5);
  return seed % 3 == 1 ? WithDropout(std::move(spec), seed) : spec;
}

ProblemSpec TrainedSpec(uint64_t seed) {
  ProblemSpec spec = RandomSpec(seed, 2e5);
  spec.problem.return_lse = true;
  return spec;
}

attend_params OnCpu(const Attention& a, const char* kernel) {
  attend_params params = ParamsOf(a);
  params.device = ATTEND_CPU;
  params.kernel = kernel;
  return params;
}

void Flash(const Attention& a) {
  const Attention* const batch[] = {&a};
  CpuFlash(batch);
}

// Both kernels, by their names in the C++ and the C interface.
struct Rung {
  const char* name;
  void (*forward)(const Attention& a);
  void (*backward)(const Attention& a, const Gradients& g, const StopFlag* stop);
};
constexpr Rung kRungs[] = {{"cpu_flash", Flash, CpuFlashGradients},
                           {"cpu_reference", CpuReference, CpuReferenceGradients}};

void ExpectSays(const std::string& words) {
  EXPECT_NE(std::string(attend_last_error()).find(words), std::string::npos) << attend_last_error();
}

TEST(AttendCCpu, GivesTheBitsOfTheCppInterface) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(100 * TestScale()) + 1;
  for (uint64_t n = 0; n < count; ++n) {
    const ProblemSpec spec = CSpec(seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    OwnedAttention owned = MakeAttention(spec, seed + n);
    for (const Rung& rung : kRungs) {
      owned.ResetOutput();
      rung.forward(owned.attention);
      const std::vector<std::byte> expected = owned.OutputBytes();
      owned.ResetOutput();
      const attend_params params = OnCpu(owned.attention, rung.name);
      ASSERT_EQ(attend_run(&params, nullptr), ATTEND_OK) << attend_last_error();
      EXPECT_EQ(owned.OutputBytes(), expected) << rung.name;
      EXPECT_TRUE(owned.GuardsIntact());
    }
  }
}

TEST(AttendCCpu, ABatchGivesTheBitsOfEachAlone) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  std::vector<OwnedAttention> all;
  std::vector<std::vector<std::byte>> expected;
  for (uint64_t n = 0; n < 12; ++n) all.push_back(MakeAttention(CSpec(seed + n), seed + n));
  std::vector<attend_params> params;
  for (OwnedAttention& one : all) {
    params.push_back(OnCpu(one.attention, params.size() % 3 == 2 ? "cpu_reference" : nullptr));
    ASSERT_EQ(attend_run(&params.back(), nullptr), ATTEND_OK) << attend_last_error();
    expected.push_back(one.OutputBytes());
    one.ResetOutput();
  }
  int64_t bytes = -1;
  const auto count = static_cast<int32_t>(params.size());
  ASSERT_EQ(attend_batch_workspace_bytes(params.data(), count, &bytes), ATTEND_OK);
  EXPECT_EQ(bytes, 0);
  ASSERT_EQ(attend_run_batch(params.data(), count, nullptr, 0, nullptr), ATTEND_OK)
      << attend_last_error();
  for (size_t n = 0; n < all.size(); ++n) EXPECT_EQ(all[n].OutputBytes(), expected[n]) << n;
}

TEST(AttendCCpu, GradientsAreThoseOfTheCppInterface) {
  const uint64_t seed = FreshSeed();
  const auto count = static_cast<uint64_t>(60 * TestScale()) + 1;
  for (uint64_t n = 0; n < count; ++n) {
    const ProblemSpec spec = TrainedSpec(seed + n);
    SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed + n) + " " + Describe(spec));
    const OwnedAttention owned = MakeAttention(spec, seed + n);
    Flash(owned.attention);
    for (const Rung& rung : kRungs) {
      const OwnedGradients expected(owned.attention, seed + n + 1);
      rung.backward(owned.attention, expected.get(), nullptr);
      const OwnedGradients got(owned.attention, seed + n + 1);
      attend_backward_params params = ToParams(owned.attention, got.get());
      params.attention.device = ATTEND_CPU;
      params.attention.kernel = rung.name;
      int64_t bytes = -1;
      ASSERT_EQ(attend_backward_workspace_bytes(&params, &bytes), ATTEND_OK) << attend_last_error();
      EXPECT_EQ(bytes, 0);
      ASSERT_EQ(attend_run_backward(&params, nullptr), ATTEND_OK) << attend_last_error();
      EXPECT_EQ(got.Bytes(), expected.Bytes()) << rung.name;
      EXPECT_TRUE(got.GuardsIntact());
    }
  }
}

// The tensors of a contiguous attention in float64.
struct InDouble {
  explicit InDouble(const Attention& a)
      : q(Copy(a.q.data, ElementsQ(a.problem))),
        k(Copy(a.k.data, ElementsK(a.problem))),
        v(Copy(a.v.data, ElementsV(a.problem))),
        o(static_cast<size_t>(ElementsO(a.problem))),
        params(OnCpu(a, "cpu_reference")) {
    params.dtype = params.o_dtype = ATTEND_FLOAT64;
    params.q.data = q.data();
    params.k.data = k.data();
    params.v.data = v.data();
    params.o.data = o.data();
  }
  static std::vector<double> Copy(const void* data, int64_t elements) {
    std::vector<double> copy(static_cast<size_t>(elements));
    LoadElements(data, DType::kFloat32, 0, elements, copy.data());
    return copy;
  }
  // sum of o * d_o.
  double Loss(const std::vector<double>& d_o) {
    EXPECT_EQ(attend_run(&params, nullptr), ATTEND_OK) << attend_last_error();
    return std::inner_product(o.begin(), o.end(), d_o.begin(), 0.0);
  }

  std::vector<double> q, k, v, o;
  attend_params params;
};

ProblemSpec ContiguousSpec() {
  ProblemSpec spec = MakeSpec(2, 4, 2, 5, 7, 8, 6);
  spec.problem.mask.right = 0;
  spec.problem.softcap = 3;
  spec.problem.has_alibi = spec.problem.has_sinks = true;
  return spec;
}

TEST(AttendCCpu, DoubleIsTheReferenceUnrounded) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  const OwnedAttention owned = MakeAttention(ContiguousSpec(), seed);
  const Problem& p = owned.attention.problem;
  InDouble twin(owned.attention);
  ASSERT_EQ(attend_run(&twin.params, nullptr), ATTEND_OK) << attend_last_error();
  std::vector<double> row(static_cast<size_t>(p.dim_v));
  double lse = 0;
  for (int64_t n = 0; n < p.batch * p.heads_q * p.len_q; ++n) {
    const int64_t b = n / p.len_q / p.heads_q, h = n / p.len_q % p.heads_q, i = n % p.len_q;
    ReferenceRow(owned.attention, b, h, i, row.data(), &lse);
    const auto first = twin.o.begin() + n * p.dim_v;
    EXPECT_TRUE(std::equal(row.begin(), row.end(), first)) << "row " << n;
  }
}

// Central differences: their error is the third derivative times the step squared, plus rounding
// errors over the step. Numbers are around 1, and each 1e-5 leaves 1e-9 or so.
TEST(AttendCCpu, GradientsInDoubleMatchDifferencesOfAnswers) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  const OwnedAttention owned = MakeAttention(ContiguousSpec(), seed);
  InDouble twin(owned.attention);
  const OwnedGradients drawn(owned.attention, seed + 1);
  const std::vector<double> d_o =
      InDouble::Copy(drawn.get().d_o.data, ElementsO(owned.attention.problem));
  std::vector<double> d_q(twin.q.size()), d_k(twin.k.size()), d_v(twin.v.size());
  attend_backward_params params = {};
  params.struct_bytes = sizeof(params);
  params.attention = twin.params;
  params.d_o = twin.params.o;
  params.d_o.data = const_cast<double*>(d_o.data());
  params.d_q = twin.params.q;
  params.d_k = twin.params.k;
  params.d_v = twin.params.v;
  params.d_q.data = d_q.data();
  params.d_k.data = d_k.data();
  params.d_v.data = d_v.data();
  ASSERT_EQ(attend_run_backward(&params, nullptr), ATTEND_OK) << attend_last_error();
  constexpr double kStep = 1e-5;
  const auto expect = [&](std::vector<double>* values, const std::vector<double>& gradient) {
    for (size_t n = 0; n < values->size(); n += 3) {
      const double before = (*values)[n];
      (*values)[n] = before + kStep;
      const double above = twin.Loss(d_o);
      (*values)[n] = before - kStep;
      const double below = twin.Loss(d_o);
      (*values)[n] = before;
      EXPECT_NEAR(gradient[n], (above - below) / (2 * kStep), 1e-7) << n;
    }
  };
  expect(&twin.q, d_q);
  expect(&twin.k, d_k);
  expect(&twin.v, d_v);
}

TEST(AttendCCpu, WritesOnlyTheRequestedGradients) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  ProblemSpec spec = MakeSpec(2, 4, 2, 5, 7, 8, 6);
  spec.problem.has_bias = spec.problem.has_sinks = true;
  const OwnedAttention owned = MakeAttention(spec, seed);
  Flash(owned.attention);
  const OwnedGradients untouched(owned.attention, seed + 1);
  const OwnedGradients got(owned.attention, seed + 1);
  attend_backward_params params = ToParams(owned.attention, got.get());
  params.attention.device = ATTEND_CPU;
  params.d_q.data = params.d_k.data = params.d_v.data = nullptr;
  params.d_bias = params.d_sinks = nullptr;
  ASSERT_EQ(attend_run_backward(&params, nullptr), ATTEND_OK) << attend_last_error();
  EXPECT_EQ(got.Bytes(), untouched.Bytes());
}

TEST(AttendCCpu, NamesTheKernelAndHasNoVariants) {
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 3, 3, 8, 8), 1);
  attend_params params = OnCpu(owned.attention, nullptr);
  const char *kernel = nullptr, *why = nullptr;
  ASSERT_EQ(attend_select(&params, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cpu_flash");
  EXPECT_STRNE(why, "");
  const OwnedGradients gradients(owned.attention, 2);
  attend_backward_params backward = ToParams(owned.attention, gradients.get());
  backward.attention.device = ATTEND_CPU;
  ASSERT_EQ(attend_select_backward(&backward, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cpu_flash");
  backward.attention.kernel = "cpu_reference";
  ASSERT_EQ(attend_select_backward(&backward, &kernel, &why), ATTEND_OK);
  EXPECT_STREQ(kernel, "cpu_reference");
  int32_t count = 0;
  ASSERT_EQ(attend_configs(&params, &count), ATTEND_OK);
  EXPECT_EQ(count, 1);
  EXPECT_STREQ(attend_config_name(&params, 0), "the_only_one");
  EXPECT_STREQ(attend_config_name(&params, 1), "");
}

TEST(AttendCCpu, RefusesBeforeItWrites) {
  OwnedAttention owned = MakeAttention(MakeSpec(2, 1, 1, 5, 7, 8, 8), 1);
  const std::vector<std::byte> before = owned.OutputBytes();
  const auto expect = [&](int32_t code, const std::string& words, void* stream,
                          const std::function<void(attend_params*)>& change) {
    attend_params params = OnCpu(owned.attention, nullptr);
    change(&params);
    EXPECT_EQ(attend_run(&params, stream), code);
    ExpectSays(words);
    EXPECT_EQ(owned.OutputBytes(), before);
  };
  constexpr int32_t kInvalid = ATTEND_INVALID_ARGUMENT;
  expect(kInvalid, "stream is not NULL, but the CPU has none", &owned, [](attend_params*) {});
  expect(kInvalid, "config is 1, must be -1 or in [0, 1) for cpu_flash", nullptr,
         [](attend_params* p) { p->config = 1; });
  expect(kInvalid, "device is -2, must be an ordinal", nullptr,
         [](attend_params* p) { p->device = -2; });
  expect(ATTEND_UNIMPLEMENTED, "kernel cuda_naive does not run on cpu", nullptr,
         [](attend_params* p) { p->kernel = "cuda_naive"; });
  expect(ATTEND_UNIMPLEMENTED, "cpu_flash_amx cannot compute this on cpu: AMX tiles take bf16",
         nullptr, [](attend_params* p) { p->kernel = "cpu_flash_amx"; });
  expect(ATTEND_UNIMPLEMENTED, "float64 is computed only by cpu_reference, which must be named",
         nullptr, [](attend_params* p) { p->dtype = p->o_dtype = ATTEND_FLOAT64; });
  expect(kInvalid, "bias_dtype is 64, must be in [1, 4]", nullptr, [&](attend_params* p) {
    p->bias = owned.input.data;
    p->bias_dtype = ATTEND_FLOAT64;
  });
  expect(kInvalid, "kernel is \"none\", must be one of auto, cpu_reference", nullptr,
         [](attend_params* p) { p->kernel = "none"; });
  const int64_t lengths[] = {5, 8}, negative[] = {-1, 0};
  expect(kInvalid, "kv_lengths[1] is 8, must be in [0, 7]", nullptr,
         [&](attend_params* p) { p->kv_lengths = lengths; });
  expect(kInvalid, "q_lengths[1] is 8, must be in [0, 5]", nullptr,
         [&](attend_params* p) { p->q_lengths = lengths; });
  expect(kInvalid, "q_lengths[0] is -1, must be in [0, 5]", nullptr,
         [&](attend_params* p) { p->q_lengths = negative; });
}

TEST(AttendCCpu, OffsetsAreCheckedBeforeUse) {
  ProblemSpec spec = MakeSpec(2, 1, 1, 5, 7, 8, 8);
  spec.problem.packed = true;
  spec.q_lengths = {2, 4};
  spec.kv_lengths = {3, 5};
  OwnedAttention owned = MakeAttention(spec, 1);
  const std::vector<std::byte> before = owned.OutputBytes();
  const auto expect = [&](std::array<int64_t, 3> q, std::array<int64_t, 3> kv,
                          const std::string& words) {
    attend_params params = OnCpu(owned.attention, nullptr);
    params.q_offsets = q.data();
    params.kv_offsets = kv.data();
    EXPECT_EQ(attend_run(&params, nullptr), ATTEND_INVALID_ARGUMENT);
    ExpectSays(words);
    EXPECT_EQ(owned.OutputBytes(), before);
  };
  expect({1, 2, 6}, {0, 3, 8}, "q_offsets[0] is 1, must be 0");
  expect({0, 2, 6}, {0, 3, 2}, "kv_offsets[2] is 2, must be in [3, 8]");
  expect({0, 2, 7}, {0, 3, 8}, "q_offsets[2] is 7, must be in [2, 6]");
  expect({0, 5, 6}, {0, 3, 8}, "q_offsets[1] is 5, must be in [0, 4]");  // the longest has 4
  const attend_params good = OnCpu(owned.attention, nullptr);
  EXPECT_EQ(attend_run(&good, nullptr), ATTEND_OK) << attend_last_error();
}

TEST(AttendCCpu, MemoryIsHostMemory) {
  void* data = nullptr;
  ASSERT_EQ(attend_malloc(ATTEND_CPU, 1000, &data), ATTEND_OK) << attend_last_error();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0U);
  EXPECT_EQ(attend_memset(ATTEND_CPU, data, 7, 1000, nullptr), ATTEND_OK);
  std::array<char, 1000> copy{};
  EXPECT_EQ(attend_memcpy(ATTEND_CPU, copy.data(), data, 1000, ATTEND_DEVICE_TO_HOST, nullptr),
            ATTEND_OK);
  EXPECT_EQ(std::count(copy.begin(), copy.end(), 7), 1000);
  EXPECT_EQ(attend_synchronize(ATTEND_CPU, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_synchronize(ATTEND_CPU, data), ATTEND_INVALID_ARGUMENT);
  ExpectSays("stream is not NULL");
  EXPECT_EQ(attend_free(ATTEND_CPU, data), ATTEND_OK);
// the system's would end the process
#if !defined(__SANITIZE_ADDRESS__) && !defined(ATTEND_THREAD_SANITIZER)
  EXPECT_EQ(attend_malloc(ATTEND_CPU, int64_t{1} << 62, &data), ATTEND_RESOURCE_EXHAUSTED);
  ExpectSays("allocating 4611686018427387904 bytes on cpu");
#endif
}

TEST(AttendCCpu, WithoutAGpuOtherDevicesAreRefused) {
  int32_t count = -1;
  ASSERT_EQ(attend_device_count(&count), ATTEND_OK);
  const OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 3, 3, 8, 8), 1);
  attend_params params = OnCpu(owned.attention, nullptr);
  params.device = count;
  const int32_t code = attend_run(&params, nullptr);
  EXPECT_TRUE(code == ATTEND_INTERNAL || code == ATTEND_UNIMPLEMENTED) << code;
  ExpectSays("cuda:" + std::to_string(count));
}

}  // namespace
}  // namespace attend::test

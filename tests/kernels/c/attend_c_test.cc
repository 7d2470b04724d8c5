// SPDX-License-Identifier: Apache-2.0
//
// The C ABI: the same answers as the C++ interface, and refusals that name the field.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/c/attend_c.h"
#include "tests/kernels/support/c_params.h"
#include "tests/kernels/support/cuda_run.h"

namespace attend::test {
namespace {

constexpr int64_t kZeroBytes = 16384;  // of the workspace, see attend_c.h

// The first bytes of a workspace are zero before its first use.
std::unique_ptr<DeviceMemory> Workspace(int64_t bytes) {
  auto memory = std::make_unique<DeviceMemory>(bytes + kZeroBytes);
  EXPECT_EQ(cudaMemset(memory->get(), 0, kZeroBytes), cudaSuccess);
  return memory;
}

bool StartsWithZeros(const DeviceMemory& workspace) {
  std::vector<char> bytes(kZeroBytes, 1);
  EXPECT_EQ(cudaMemcpy(bytes.data(), workspace.get(), kZeroBytes, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return std::count(bytes.begin(), bytes.end(), 0) == kZeroBytes;
}

// An attention with its memory on the device, and the C++ interface's answer.
struct Case {
  Case(OwnedAttention attention, KernelId id, int config = cuda::kDefaultConfig)
      : name(KernelName(id)), owned(std::move(attention)) {
    run = std::make_unique<DeviceRun>(&owned, id);
    status = run->Run(config);
    expected = owned.OutputBytes();
    params = ParamsOf(run->attention());
    params.kernel = name.c_str();
    params.config = config;
  }

  // Device address of the output block's first byte.
  char* Output() const {
    return Moved(static_cast<char*>(owned.output.data), owned.attention.o.data, params.o.data);
  }

  // Clears the answer, here and on the device.
  void Reset() {
    owned.ResetOutput();
    const auto bytes = static_cast<size_t>(owned.output.bytes);
    EXPECT_EQ(cudaMemcpy(Output(), owned.output.data, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }

  std::vector<std::byte> Answer() {
    const auto bytes = static_cast<size_t>(owned.output.bytes);
    EXPECT_EQ(cudaMemcpy(owned.output.data, Output(), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    return owned.OutputBytes();
  }

  std::string name;
  OwnedAttention owned;
  std::unique_ptr<DeviceRun> run;
  Status status;
  std::vector<std::byte> expected;
  attend_params params;
};

// A problem drawn for the kernel; null if the kernel does not support it.
std::unique_ptr<Case> DrawCase(uint64_t seed, KernelId id) {
  const bool aligned = id == KernelId::kCudaFlashSm90;
  OwnedAttention owned =
      MakeAttention(aligned ? AlignedSpec(seed) : RandomKernelSpec(seed, 3e5), seed);
  if (!CanRun(owned.attention, id)) return nullptr;
  return std::make_unique<Case>(std::move(owned), id);
}

// Runs it alone through the C interface.
void ExpectItsBits(Case* one, const std::string& label) {
  attend_params& params = one->params;
  ASSERT_EQ(attend_workspace_bytes(&params, &params.workspace_bytes), ATTEND_OK)
      << attend_last_error();
  const auto workspace = Workspace(params.workspace_bytes);
  params.workspace = workspace->get();
  one->Reset();
  ASSERT_EQ(attend_run(&params, nullptr), ATTEND_OK) << attend_last_error();
  ASSERT_EQ(attend_synchronize(0, nullptr), ATTEND_OK) << attend_last_error();
  EXPECT_EQ(one->expected, one->Answer()) << one->name << " " << label;
}

TEST(AttendC, GivesTheBitsOfTheCppInterface) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < 60; ++n) {
    for (const KernelId id : kCudaKernels) {
      const std::unique_ptr<Case> one = DrawCase(seed + n, id);
      if (one == nullptr) continue;
      ASSERT_TRUE(one->status.ok()) << one->status.message();
      ASSERT_NO_FATAL_FAILURE(
          ExpectItsBits(one.get(), "ATTEND_TEST_SEED=" + std::to_string(seed + n)));
    }
  }
}

TEST(AttendC, ABatchGivesTheBitsOfEachAlone) {
  const uint64_t seed = FreshSeed();
  std::vector<std::unique_ptr<Case>> cases;
  std::vector<attend_params> params;
  for (uint64_t n = 0; n < 40; ++n) {
    std::unique_ptr<Case> one = DrawCase(seed + n, kCudaKernels[n % std::size(kCudaKernels)]);
    if (one == nullptr) continue;
    ASSERT_TRUE(one->status.ok()) << one->status.message();
    cases.push_back(std::move(one));
    params.push_back(cases.back()->params);
  }
  const auto count = static_cast<int32_t>(params.size());
  int64_t bytes = 0;
  ASSERT_EQ(attend_batch_workspace_bytes(params.data(), count, &bytes), ATTEND_OK)
      << attend_last_error();
  const auto workspace = Workspace(bytes);
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (const auto& one : cases) one->Reset();
    ASSERT_EQ(attend_run_batch(params.data(), count, workspace->get(), bytes, nullptr), ATTEND_OK)
        << attend_last_error();
    ASSERT_EQ(attend_synchronize(0, nullptr), ATTEND_OK) << attend_last_error();
    for (size_t n = 0; n < cases.size(); ++n) {
      EXPECT_EQ(cases[n]->expected, cases[n]->Answer())
          << cases[n]->name << " case " << n << " ATTEND_TEST_SEED=" << seed << ", repeat "
          << repeat;
    }
    EXPECT_TRUE(StartsWithZeros(*workspace));
  }
}

TEST(AttendC, MemoryCopiesRoundTrip) {
  void* data = nullptr;
  const std::string text = "sixteen bytes...";
  const auto bytes = static_cast<int64_t>(text.size());
  ASSERT_EQ(attend_malloc(0, 2 * bytes, &data), ATTEND_OK) << attend_last_error();
  char* second = static_cast<char*>(data) + bytes;
  std::string back(2 * text.size(), '?');
  EXPECT_EQ(attend_memcpy(0, data, text.data(), bytes, ATTEND_HOST_TO_DEVICE, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_memcpy(0, second, data, bytes, ATTEND_DEVICE_TO_DEVICE, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_memset(0, data, '!', 1, nullptr), ATTEND_OK);
  EXPECT_EQ(attend_memcpy(0, back.data(), data, 2 * bytes, ATTEND_DEVICE_TO_HOST, nullptr),
            ATTEND_OK);
  EXPECT_EQ(attend_synchronize(0, nullptr), ATTEND_OK) << attend_last_error();
  EXPECT_EQ(back, "!" + text.substr(1) + text);
  EXPECT_EQ(attend_free(0, data), ATTEND_OK);
  EXPECT_EQ(attend_malloc(0, INT64_MAX / 2, &data), ATTEND_RESOURCE_EXHAUSTED);
  EXPECT_EQ(data, nullptr);
  int32_t count = 0;
  EXPECT_EQ(attend_device_count(&count), ATTEND_OK);
  EXPECT_GE(count, 1);
}

TEST(AttendC, RefusalsNameTheField) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 8, 8, 16, 16), FreshSeed());
  DeviceRun run(&owned, KernelId::kCudaNaive);
  ASSERT_TRUE(run.Run().ok());
  const attend_params good = ParamsOf(run.attention());
  const auto expect = [](attend_params params, int32_t code, const char* word) {
    EXPECT_EQ(attend_run(&params, nullptr), code);
    EXPECT_NE(std::string(attend_last_error()).find(word), std::string::npos)
        << attend_last_error();
  };
  attend_params bad = good;
  bad.struct_bytes = 8;
  expect(bad, ATTEND_INVALID_ARGUMENT, "struct_bytes");
  bad = good;
  bad.dtype = 9;
  expect(bad, ATTEND_INVALID_ARGUMENT, "dtype");
  bad = good;
  bad.dim = 257;
  expect(bad, ATTEND_INVALID_ARGUMENT, "257");
  bad = good;
  bad.heads_kv = 3;
  expect(bad, ATTEND_INVALID_ARGUMENT, "heads");
  bad = good;
  bad.k.data = nullptr;
  expect(bad, ATTEND_INVALID_ARGUMENT, "k is NULL");
  bad = good;
  bad.kernel = "no_such_kernel";
  expect(bad, ATTEND_INVALID_ARGUMENT, "no_such_kernel");
  bad = good;
  bad.kernel = "cpu_flash";
  expect(bad, ATTEND_UNIMPLEMENTED, "cpu_flash");
  bad = good;
  bad.kernel = "cuda_naive";  // without its workspace
  expect(bad, ATTEND_INVALID_ARGUMENT, "workspace_bytes");
  bad.workspace = reinterpret_cast<void*>(uintptr_t{4096 + 128});  // never touched
  bad.workspace_bytes = INT64_MAX;
  expect(bad, ATTEND_INVALID_ARGUMENT, "multiple of 256");
  bad = good;
  bad.device = 4096;
  expect(bad, ATTEND_INTERNAL, "cuda:4096");
  attend_params again = good;
  ASSERT_EQ(attend_workspace_bytes(&again, &again.workspace_bytes), ATTEND_OK);
  const auto workspace = Workspace(again.workspace_bytes);
  again.workspace = workspace->get();
  EXPECT_EQ(attend_run(&again, nullptr), ATTEND_OK);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(AttendC, ReportsItsSelection) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 8, 8, 16, 16), FreshSeed());
  attend_params params = ParamsOf(owned.attention);
  const char* kernel = nullptr;
  const char* why = nullptr;
  ASSERT_EQ(attend_select(&params, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cuda_flash_fp32");  // float32
  EXPECT_STRNE(why, "");
  params.kernel = "cuda_naive";
  ASSERT_EQ(attend_select(&params, &kernel, nullptr), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cuda_naive");
  params.kernel = "no_such_kernel";
  EXPECT_EQ(attend_select(&params, &kernel, &why), ATTEND_INVALID_ARGUMENT);
}

constexpr char kNoHopper[] = "no GPU that cuda_flash_sm90 runs on";

TEST(AttendC, SelectsAndRefusesHoppersKernelByItsMemory) {
  OwnedAttention owned =
      MakeAttention(MakeSpec(1, 2, 1, 8, 8, 16, 16, DType::kFloat16), FreshSeed());
  if (!CanRun(owned.attention, KernelId::kCudaFlashSm90)) GTEST_SKIP() << kNoHopper;
  DeviceRun run(&owned, KernelId::kCudaFlashSm90);
  ASSERT_TRUE(run.Prepare().ok());
  attend_params params = ParamsOf(run.attention());
  const char* kernel = nullptr;
  const char* why = nullptr;
  ASSERT_EQ(attend_select(&params, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cuda_flash_sm90");
  int64_t aligned_bytes = 0;
  ASSERT_EQ(attend_workspace_bytes(&params, &aligned_bytes), ATTEND_OK) << attend_last_error();
  params.q.data = static_cast<char*>(params.q.data) + 2;
  ASSERT_EQ(attend_select(&params, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cuda_flash_sm90");
  std::string reason = why;
  EXPECT_NE(reason.find("copied to 16-byte boundaries"), std::string::npos) << reason;
  int64_t bytes = 0;
  ASSERT_EQ(attend_workspace_bytes(&params, &bytes), ATTEND_OK) << attend_last_error();
  EXPECT_EQ(bytes, aligned_bytes + 512) << "2 heads of 8 rows of 16 columns";
  const DeviceMemory workspace(bytes);
  params.workspace = workspace.get();
  params.workspace_bytes = bytes - 1;
  EXPECT_EQ(attend_run(&params, nullptr), ATTEND_INVALID_ARGUMENT);

  params.bias = params.q.data;
  params.bias_dtype = ATTEND_FLOAT16;
  ASSERT_EQ(attend_select(&params, &kernel, &why), ATTEND_OK) << attend_last_error();
  EXPECT_STREQ(kernel, "cuda_flash_sm80");
  reason = why;
  params.kernel = "cuda_flash_sm90";
  EXPECT_EQ(attend_select(&params, &kernel, &why), ATTEND_UNIMPLEMENTED);
  EXPECT_NE(std::string(attend_last_error()).find(reason), std::string::npos)
      << attend_last_error();
  EXPECT_EQ(attend_run(&params, nullptr), ATTEND_UNIMPLEMENTED);
  EXPECT_EQ(attend_workspace_bytes(&params, &bytes), ATTEND_UNIMPLEMENTED);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(AttendC, HoppersConfigsHaveNamesAndRun) {
  const uint64_t seed = FreshSeed();
  for (const int64_t dim : {64, 128}) {
    const ProblemSpec spec = MakeSpec(2, 4, 2, 150, 300, dim, dim, DType::kBFloat16);
    const OwnedAttention owned = MakeAttention(spec, seed);
    if (!CanRun(owned.attention, KernelId::kCudaFlashSm90)) GTEST_SKIP() << kNoHopper;
    attend_params params = ParamsOf(owned.attention);
    params.kernel = "cuda_flash_sm90";
    int32_t count = 0;
    ASSERT_EQ(attend_configs(&params, &count), ATTEND_OK) << attend_last_error();
    EXPECT_GE(count, dim == 64 ? 3 : 1) << "few tiles have their own";
    std::set<std::string> names;
    for (int32_t n = 0; n < count; ++n) {
      const std::string name = attend_config_name(&params, n);
      EXPECT_EQ(name.rfind("d" + std::to_string(dim) + "_rows", 0), 0u) << name;
      EXPECT_TRUE(names.insert(name).second) << name;
      Case one(MakeAttention(spec, seed), KernelId::kCudaFlashSm90, n);
      ASSERT_TRUE(one.status.ok()) << one.status.message();
      ASSERT_NO_FATAL_FAILURE(ExpectItsBits(&one, name));
    }
    EXPECT_STREQ(attend_config_name(&params, count), "");
    EXPECT_STREQ(attend_config_name(&params, -1), "");
  }
}

TEST(AttendC, NamesTheKernelsConfigs) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 8, 8, 128, 128), FreshSeed());
  attend_params params = ParamsOf(owned.attention);
  int32_t count = 0;
  ASSERT_EQ(attend_configs(&params, &count), ATTEND_OK) << attend_last_error();
  ASSERT_GE(count, 1);
  for (int32_t n = 0; n < count; ++n) EXPECT_STRNE(attend_config_name(&params, n), "");
  EXPECT_STREQ(attend_config_name(&params, count), "");
}

}  // namespace
}  // namespace attend::test

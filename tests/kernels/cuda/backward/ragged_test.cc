// SPDX-License-Identifier: Apache-2.0
//
// Backward passes of different shapes in one call: each gives the same bits as alone, which
// backward_test.cc checks, and similar ones share launches.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/cuda/backward/run_backward.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// More than one launch takes, of either dtype.
constexpr int kItems = 34;

// Adds `part` to all keys and values: rows are then measured, which is otherwise rare.
void GiveCommonPart(OwnedAttention* owned, float part) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  const auto add = [&](void* element) { Set(a, element, Get(a, element) + part); };
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t keys = SequenceOf(a, b).k_len;
    for (int64_t row = 0; row < p.heads_kv * keys; ++row) {
      for (int64_t d = 0; d < p.dim; ++d) add(owned->K(b, row / keys, row % keys, d));
      for (int64_t d = 0; d < p.dim_v; ++d) add(owned->V(b, row / keys, row % keys, d));
    }
  }
}

// A pass, alone and beside others.
struct RaggedCase {
  RaggedCase(const ProblemSpec& spec, uint64_t case_seed, float common_part = 0)
      : owned(MakeAttention(spec, case_seed)), seed(case_seed) {
    if (common_part != 0) GiveCommonPart(&owned, common_part);
    CpuReference(owned.attention);
    Renew();
  }
  void Renew() { gradients = std::make_unique<OwnedGradients>(owned.attention, seed + 1); }

  OwnedAttention owned;
  uint64_t seed;
  std::unique_ptr<OwnedGradients> gradients;
};

// Shapes that differ in everything that may differ within a launch; some have no keys or no rows.
ProblemSpec ShapeOf(uint64_t n, int64_t dim, int64_t dim_v, DType dtype) {
  const int64_t heads_kv = 1 + static_cast<int64_t>(n % 2);
  const int64_t group = 1 + static_cast<int64_t>(n / 2 % 2);
  const auto len_q = n % 7 == 6 ? 0 : static_cast<int64_t>(1 + 71 * n % 190);
  const auto len_k = n % 7 == 4 ? 0 : static_cast<int64_t>(1 + 97 * n % 230);
  ProblemSpec spec = MakeSpec(1 + static_cast<int64_t>(n % 2), group * heads_kv, heads_kv, len_q,
                              len_k, dim, dim_v, dtype);
  spec.layout = n % 3 == 0 ? Layout::kBLHD : Layout::kBHLD;
  if (n % 4 == 1) spec.problem.mask.right = 0;
  if (n % 4 == 2) spec.problem.mask.left = 30;
  if (n % 5 == 3) {
    spec.problem.packed = true;
    spec.q_lengths = {len_q, 0, 65};
    spec.kv_lengths = {len_k, 130, 3};
  }
  spec.problem.return_lse = true;
  return spec;
}

struct Family {
  std::string name;
  int64_t dim, dim_v;
  std::function<void(ProblemSpec*, uint64_t)> change = [](ProblemSpec*, uint64_t) {};
};

std::vector<Family> Families() {
  const auto bias = [](ProblemSpec* spec, uint64_t) {
    // Packed sequences have none; ALiBi's kernels are the same.
    (spec->problem.packed ? spec->problem.has_alibi : spec->problem.has_bias) = true;
  };
  const auto sinks = [](ProblemSpec* spec, uint64_t) { spec->problem.has_sinks = true; };
  const auto softcap = [](ProblemSpec* spec, uint64_t) { spec->problem.softcap = 5.0f; };
  const auto dropout = [](ProblemSpec* spec, uint64_t seed) { *spec = WithDropout(*spec, seed); };
  const auto both = [=](ProblemSpec* spec, uint64_t seed) {
    softcap(spec, seed);
    dropout(spec, seed);
  };
  return {
      {"D64", 64, 64},
      {"D96", 96, 80},
      {"D128", 128, 128},
      {"D192", 192, 128},
      {"D256", 256, 256},
      {"D64 with softcap", 64, 64, softcap},
      {"D128 with softcap", 128, 128, softcap},
      {"D64 with bias", 64, 64, bias},
      {"D192 with bias", 192, 128, bias},
      {"D256 with bias", 256, 256, bias},
      {"D128 with sinks", 128, 128, sinks},
      {"D64 with dropout", 64, 64, dropout},
      {"D96 with dropout", 96, 96, dropout},
      {"D128 with dropout", 128, 128, dropout},
      {"D64 with softcap and dropout", 64, 64, both},
      {"D192 with dropout", 192, 128, dropout},
  };
}

// Calls use(graph) with the graph that a call is captured as.
template <class Use>
Status WithGraph(std::span<const cuda::BackwardItem> items, const DeviceMemory& memory,
                 int64_t bytes, const Use& use) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaStreamCreate(&stream), "a stream"));
  Status status = cuda::ToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                 "begin of a capture");
  if (status.ok()) status = cuda::LaunchBackward(items, memory.get(), bytes, stream);
  const Status ended = cuda::ToStatus(cudaStreamEndCapture(stream, &graph), "end of a capture");
  if (status.ok()) status = ended;
  if (status.ok()) status = use(graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return status;
}

// Its nodes: launches, and filling of memory.
Result<size_t> CapturedNodes(std::span<const cuda::BackwardItem> items, const DeviceMemory& memory,
                             int64_t bytes) {
  size_t nodes = 0;
  ATTEND_RETURN_IF_ERROR(WithGraph(items, memory, bytes, [&](cudaGraph_t graph) {
    return cuda::ToStatus(cudaGraphGetNodes(graph, nullptr, &nodes), "nodes of a graph");
  }));
  return nodes;
}

// Launches it twice.
Status Replay(std::span<const cuda::BackwardItem> items, const DeviceMemory& memory,
              int64_t bytes) {
  return WithGraph(items, memory, bytes, [](cudaGraph_t graph) {
    cudaGraphExec_t launched = nullptr;
    cudaError_t error = cudaGraphInstantiate(&launched, graph, 0);
    for (int n = 0; n < 2 && error == cudaSuccess; ++n) error = cudaGraphLaunch(launched, nullptr);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (launched != nullptr) cudaGraphExecDestroy(launched);
    return cuda::ToStatus(error, "replays of a graph");
  });
}

// Launches all together with `bytes` of poisoned workspace; `replays`: then twice more, as a graph,
// with what the pass before left in it.
Status RunTogether(std::span<const std::unique_ptr<BackwardRun>> runs, int64_t bytes,
                   bool replays = false) {
  std::vector<cuda::BackwardItem> items;
  for (const auto& run : runs) {
    ATTEND_RETURN_IF_ERROR(run->Prepare());
    items.push_back(run->item());
  }
  const DeviceMemory workspace(bytes);
  ATTEND_RETURN_IF_ERROR(
      cuda::ToStatus(cudaMemset(workspace.get(), 0xff, static_cast<size_t>(bytes)), "poisoning"));
  ATTEND_RETURN_IF_ERROR(cuda::LaunchBackward(items, workspace.get(), bytes, nullptr));
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(cudaDeviceSynchronize(), "the backward passes"));
  if (replays) ATTEND_RETURN_IF_ERROR(Replay(items, workspace, bytes));
  for (const auto& run : runs) ATTEND_RETURN_IF_ERROR(run->Fetch());
  return Status();
}

std::vector<std::unique_ptr<BackwardRun>> RunsOf(std::span<RaggedCase* const> cases,
                                                 const Way& way) {
  std::vector<std::unique_ptr<BackwardRun>> runs;
  for (RaggedCase* each : cases) {
    each->Renew();
    runs.push_back(std::make_unique<BackwardRun>(&each->owned, each->gradients.get(), way));
  }
  return runs;
}

// Bytes that the items would use, and the least that they need.
std::pair<int64_t, int64_t> WorkspaceOf(std::span<RaggedCase* const> cases, const Way& way) {
  std::vector<cuda::BackwardItem> items;
  int64_t least = 0;
  for (const RaggedCase* each : cases) {
    items.push_back({way.kernel, each->owned.attention, each->gradients->get(), way.room_for_turns,
                     way.block_bytes_max});
    least = std::max(least, *cuda::BackwardWorkspaceBytes({&items.back(), 1}));
  }
  return {*cuda::BackwardWorkspaceBytes(items), least};
}

TEST(CudaBackwardRagged, EachGivesTheSameBitsAsAlone) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const Family& family : Families()) {
    std::vector<std::unique_ptr<RaggedCase>> all;
    for (uint64_t n = 0; n < kItems; ++n) {
      ProblemSpec spec = ShapeOf(seed % 1000 + n, family.dim, family.dim_v,
                                 n % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
      family.change(&spec, seed + n);
      all.push_back(std::make_unique<RaggedCase>(spec, seed + n, n % 3 == 1 ? 2.0f : 0.0f));
    }
    for (const Way& way : kWays) {
      SCOPED_TRACE(family.name + ", " + NameOf(way));
      std::vector<RaggedCase*> cases;
      std::vector<std::vector<std::byte>> alone;
      for (const auto& each : all) {
        each->Renew();
        if (!Takes(way, each->owned.attention, each->gradients->get())) continue;
        const Status status = RunBackward(&each->owned, each->gradients.get(), way);
        ASSERT_TRUE(status.ok()) << status.ToString();
        alone.push_back(each->gradients->Bytes());
        cases.push_back(each.get());
      }
      if (cases.empty()) continue;
      const auto [wanted, least] = WorkspaceOf(cases, way);
      for (const int64_t bytes : {wanted, least}) {
        const Status status = RunTogether(RunsOf(cases, way), bytes);
        ASSERT_TRUE(status.ok()) << status.ToString();
        for (size_t n = 0; n < cases.size(); ++n) {
          EXPECT_EQ(cases[n]->gradients->Bytes(), alone[n])
              << Describe(cases[n]->owned.attention.problem);
          EXPECT_TRUE(cases[n]->gradients->GuardsIntact());
        }
      }
    }
  }
}

// Passes of which every `every`th has NaN or Inf in the middle of V, which some rows do not see.
// Some have more tiles than a cluster has blocks.
std::vector<std::unique_ptr<RaggedCase>> SpoiltCases(uint64_t seed, int64_t dim, uint64_t every) {
  constexpr uint64_t kCases = 18;  // more than one launch takes
  std::vector<std::unique_ptr<RaggedCase>> all;
  for (uint64_t n = 0; n < kCases; ++n) {
    ProblemSpec spec = ShapeOf(n, dim, dim, DType::kFloat16);
    if (n % 4 == 0) {
      spec = MakeSpec(1, 4, 2, 330, 700, dim, dim, DType::kFloat16);
      spec.problem.mask = {Alignment::kBottomRight, n % 8 == 0 ? -1 : 400, 0};
      spec.problem.return_lse = true;
    }
    all.push_back(std::make_unique<RaggedCase>(spec, seed + n));
    OwnedAttention& owned = all.back()->owned;
    const int64_t keys = SequenceOf(owned.attention, 0).k_len;
    if (n % every != 0 || keys == 0) continue;
    const float poison = n % 3 == 0 ? std::numeric_limits<float>::infinity()
                                    : std::numeric_limits<float>::quiet_NaN();
    Set(owned.attention, owned.V(0, 0, keys / 2, 0), poison);
    CpuReference(owned.attention);
  }
  return all;
}

// Passes that must be computed again in fp32 are, however many share a launch, and in each replay;
// their neighbours are not.
TEST(CudaBackwardRagged, OnlyNonFinitePassesAreComputedAgain) {
  const uint64_t seed = FreshSeed();
  SCOPED_TRACE("ATTEND_TEST_SEED=" + std::to_string(seed));
  for (const auto& [dim, every] :
       {std::pair<int64_t, uint64_t>{64, 1}, {64, 5}, {96, 1}, {256, 1}}) {
    const auto all = SpoiltCases(seed, dim, every);
    for (const Way& way : kWays) {
      SCOPED_TRACE(NameOf(way) + ", D " + std::to_string(dim));
      std::vector<RaggedCase*> cases;
      std::vector<std::vector<std::byte>> alone;
      for (const auto& each : all) {
        each->Renew();
        if (!Takes(way, each->owned.attention, each->gradients->get())) continue;
        const Status status = RunBackward(&each->owned, each->gradients.get(), way);
        ASSERT_TRUE(status.ok()) << status.ToString();
        alone.push_back(each->gradients->Bytes());
        cases.push_back(each.get());
      }
      if (cases.empty()) continue;
      const Status status = RunTogether(RunsOf(cases, way), WorkspaceOf(cases, way).first, true);
      ASSERT_TRUE(status.ok()) << status.ToString();
      for (size_t n = 0; n < cases.size(); ++n) {
        EXPECT_EQ(cases[n]->gradients->Bytes(), alone[n]) << n;
      }
    }
  }
}

TEST(CudaBackwardRagged, SimilarItemsShareLaunches) {
  for (const Family& family : Families()) {
    const bool wide_dropout = family.dim > 96 && family.name.find("dropout") != std::string::npos;
    std::vector<std::unique_ptr<RaggedCase>> all;
    std::vector<RaggedCase*> cases;
    for (uint64_t n = 0; n < 12; ++n) {
      if (n % 5 == 3) continue;  // packed ones have no gradient of a bias
      ProblemSpec spec = ShapeOf(n, family.dim, family.dim_v, DType::kBFloat16);
      family.change(&spec, n);
      all.push_back(std::make_unique<RaggedCase>(spec, n + 1));
      cases.push_back(all.back().get());
    }
    for (const Way& way : kWays) {
      SCOPED_TRACE(family.name + ", " + NameOf(way));
      const bool taken = std::all_of(cases.begin(), cases.end(), [&](RaggedCase* each) {
        return Takes(way, each->owned.attention, each->gradients->get());
      });
      if (!taken) continue;
      // dK and dV have a kernel for one item only.
      if (wide_dropout && way.kernel == KernelId::kCudaFlashSm90) continue;
      const auto runs = RunsOf(cases, way);
      std::vector<cuda::BackwardItem> items;
      for (const auto& run : runs) {
        const Status status = run->Prepare();
        ASSERT_TRUE(status.ok()) << status.ToString();
        items.push_back(run->item());
      }
      const int64_t bytes = *cuda::BackwardWorkspaceBytes(items);
      const DeviceMemory workspace(bytes);
      const Result<size_t> one = CapturedNodes({items.data(), 1}, workspace, bytes);
      ASSERT_TRUE(one.ok()) << one.status().ToString();
      const Result<size_t> together = CapturedNodes(items, workspace, bytes);
      ASSERT_TRUE(together.ok()) << together.status().ToString();
      EXPECT_EQ(*together, *one);
    }
  }
}

}  // namespace
}  // namespace attend::test

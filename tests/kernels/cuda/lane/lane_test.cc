// SPDX-License-Identifier: Apache-2.0
//
// A lane with many small items and with large ones: gathers, scatters, cuts and
// overlaps, and nothing of it shows in an answer.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/lane/cut_plan.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/reference/check_rows.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/lane_harness.h"

namespace attend::test {
namespace {

using cuda::LaneTuning;

class CudaLaneTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
    ASSERT_TRUE(harness.ok()) << harness.status().ToString();
    harness_ = std::move(*harness);
  }

  std::unique_ptr<Lane> MakeLane(const LaneTuning& tuning, int64_t workspace_bytes = 1 << 20) {
    Result<std::unique_ptr<Lane>> lane = harness_->MakeLane(tuning, workspace_bytes);
    EXPECT_TRUE(lane.ok()) << lane.status().ToString();
    return lane.ok() ? std::move(*lane) : nullptr;
  }

  Selection Choose(const Attention& attention, std::string_view kernel = {}) {
    const Result<Selection> selection = harness_->Choose(attention, kernel);
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    return selection.ok() ? *selection : Selection{};
  }

  // The answer's bytes, gaps included, computed alone and checked; empty if it was wrong.
  std::vector<std::byte> Answer(Lane* lane, OwnedAttention* owned, std::string_view kernel,
                                int64_t* parts) {
    owned->ResetOutput();
    const PinnedAttention pinned(owned, &harness_->pinned());
    const WorkItem item = pinned.Item(Choose(owned->attention, kernel));
    const Result<BatchOutcome> outcome = RunBatch(lane, {&item, 1});
    EXPECT_TRUE(outcome.ok()) << outcome.status().ToString();
    if (!outcome.ok()) return {};
    EXPECT_TRUE(outcome->statuses[0].ok()) << outcome->statuses[0].ToString();
    EXPECT_GT(outcome->span_ns, 0);
    if (parts != nullptr) *parts = outcome->cut_parts;
    pinned.Fetch();
    const RowsReport report = CheckRows(owned->attention, SampleRows(owned->attention, 1, 1e7));
    EXPECT_TRUE(report.ok) << report.detail << " " << Describe(owned->attention.problem);
    return report.ok ? owned->OutputBytes() : std::vector<std::byte>();
  }

  std::unique_ptr<LaneHarness> harness_;
};

// Any item has the same bits alone or among others, page-locked or not, and with any kind of copy:
// those that a lane with the same cuts gives it alone.
TEST_F(CudaLaneTest, NeighboursAndCopiesDoNotChangeBits) {
  const uint64_t seed = FreshSeed();
  uint64_t next = seed;
  int64_t cut = 0;
  for (int round = 0; round < 60; ++round) {
    LaneTuning tuning;
    tuning.copy_kernel_bytes_max = std::vector<int64_t>{0, 4096, 1 << 20}[round % 3];
    tuning.batch_copies = round % 2 == 1;
    tuning.multiprocessors_free = round % 5;
    tuning.cut.parts_min = 1 + round % 4;
    std::unique_ptr<Lane> lane = MakeLane(tuning);
    std::unique_ptr<Lane> alone = MakeLane({.cut = tuning.cut});
    std::vector<OwnedAttention> owned;
    std::vector<std::unique_ptr<PinnedAttention>> pinned;
    std::vector<std::vector<std::byte>> wanted;
    std::vector<WorkItem> items;
    owned.reserve(12);  // PinnedAttention keeps pointers
    for (int n = 0; n <= round % 12; ++n, ++next) {
      const char* kernels[] = {"auto", "cuda_flash_fp32", "cuda_naive"};
      ProblemSpec spec = next % 3 == 0 ? AlignedSpec(next) : RandomSpec(next, 3e5);
      owned.push_back(MakeAttention(next % 5 == 1 ? WithDropout(spec, next) : spec, next));
      int64_t parts = 0;
      wanted.push_back(Answer(alone.get(), &owned.back(), kernels[next % 3], &parts));
      ASSERT_FALSE(HasFailure()) << "ATTEND_TEST_SEED=" << seed;
      cut += parts;
      owned.back().ResetOutput();
      pinned.push_back(std::make_unique<PinnedAttention>(&owned.back(), &harness_->pinned(),
                                                         next % 2 == 0 ? 0 : 256));
      const Selection selection = Choose(owned.back().attention, kernels[next % 3]);
      items.push_back(next % 4 == 0 ? owned.back().Item(selection)
                                    : pinned.back()->Item(selection));
    }
    for (int repeat = 0; repeat < 2; ++repeat) {
      const Result<BatchOutcome> outcome = RunBatch(lane.get(), items);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
      for (size_t n = 0; n < items.size(); ++n) {
        ASSERT_TRUE(outcome->statuses[n].ok()) << outcome->statuses[n].ToString();
        if (items[n].inputs[0].data != owned[n].input.data) pinned[n]->Fetch();
        ASSERT_TRUE(wanted[n] == owned[n].OutputBytes())
            << Describe(owned[n].attention.problem) << " ATTEND_TEST_SEED=" << seed;
      }
    }
  }
  EXPECT_GT(cut, 20);
}

// Tensors in pieces of any sizes at any addresses, some bytes left where they belong: the bits of
// the same attention in one piece.
TEST_F(CudaLaneTest, GathersInputs) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  std::unique_ptr<Lane> lane = MakeLane({});
  for (int round = 0; round < 24; ++round) {
    std::vector<OwnedAttention> owned;
    std::vector<std::unique_ptr<PinnedAttention>> pinned;
    std::vector<std::unique_ptr<PinnedBlock>> elsewhere;
    std::vector<std::vector<HostPiece>> pieces(static_cast<size_t>(round % 7) + 1);
    std::vector<std::vector<std::byte>> wanted;
    std::vector<WorkItem> items;
    owned.reserve(pieces.size());  // PinnedAttention keeps pointers
    for (size_t n = 0; n < pieces.size(); ++n) {
      owned.push_back(MakeAttention(AlignedSpec(seed + n + 10 * round), seed + n));
      int64_t parts = 0;
      wanted.push_back(Answer(lane.get(), &owned.back(), "auto", &parts));
      ASSERT_FALSE(HasFailure()) << "ATTEND_TEST_SEED=" << seed;
      owned.back().ResetOutput();
      pinned.push_back(std::make_unique<PinnedAttention>(&owned.back(), &harness_->pinned()));
      items.push_back(pinned.back()->Item(Choose(owned.back().attention, "auto")));
      const HostSpan span = items.back().inputs[0];
      elsewhere.push_back(std::make_unique<PinnedBlock>(3 * span.bytes + 4096, nullptr));
      auto* const begin = static_cast<char*>(span.data);
      char* to = elsewhere.back()->get();
      // The arrays, which the host reads too, come last.
      const Attention& a = items.back().attention;
      int64_t tensors = span.bytes;
      for (const void* array :
           {static_cast<const void*>(a.q_lengths), static_cast<const void*>(a.kv_lengths),
            static_cast<const void*>(a.q_offsets), static_cast<const void*>(a.kv_offsets)}) {
        if (array == nullptr) continue;
        tensors = std::min<int64_t>(tensors, static_cast<const char*>(array) - begin);
      }
      for (int64_t at = 0; at < tensors;) {
        const int64_t bytes =
            std::min<int64_t>(tensors - at, 1 + static_cast<int64_t>(random() % 40000));
        to += random() % 48;
        std::copy_n(begin + at, bytes, to);
        std::fill_n(begin + at, bytes, static_cast<char>(0xEE));  // not to be read
        pieces[n].push_back({to, begin + at, bytes});
        to += bytes;
        at += bytes + static_cast<int64_t>(random() % 3 * (random() % 100));
      }
      items.back().gathered = pieces[n];
    }
    const Result<BatchOutcome> outcome = RunBatch(lane.get(), items);
    ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
    for (size_t n = 0; n < items.size(); ++n) {
      ASSERT_TRUE(outcome->statuses[n].ok()) << outcome->statuses[n].ToString();
      pinned[n]->Fetch();
      ASSERT_TRUE(wanted[n] == owned[n].OutputBytes())
          << Describe(owned[n].attention.problem) << " ATTEND_TEST_SEED=" << seed;
    }
  }
}

ProblemSpec CutSpec(int kind, Layout layout, DType dtype) {
  ProblemSpec spec = MakeSpec(2, 4, 2, 1700, 1700, 64, 64, dtype);
  Problem& p = spec.problem;
  spec.layout = layout;
  switch (kind) {
    case 0:
      break;
    case 1:
      p.mask.right = 0;
      break;
    case 2:
      p.mask = {Alignment::kBottomRight, 300, 0};
      p.has_sinks = true;
      break;
    case 3:
      spec.q_lengths = {1700, 900};
      spec.kv_lengths = {33, 1700};
      break;
    case 4:
      p.packed = true;
      p.mask.right = 0;
      spec.q_lengths = {1000, 700};
      spec.kv_lengths = {1100, 650};
      break;
    case 5:
      p.len_k = 200;
      p.has_bias = true;
      spec.bias_per_sequence = false;
      break;
    default:
      p.has_alibi = true;
      p.mask.right = 0;
      break;
  }
  return spec;
}
constexpr int kCutKinds = 7;

// Whether every part is computed by the variant that would compute the whole.
bool SameVariants(const Attention& a, KernelId kernel, const LaneTuning& tuning) {
  const auto variant = [kernel](const Problem& p) {
    const auto variants = cuda::VariantsFor(kernel, p);
    return variants.empty() ? nullptr : variants.front().kernel;
  };
  for (const AttentionSlice& slice : cuda::PlanParts(a, kernel, tuning.cut)) {
    const Result<Attention> part = TakeSlice(a, slice);
    if (!part.ok() || variant(part->problem) != variant(a.problem)) return false;
  }
  return true;
}

// Every layout and mask in parts: right, the same again, and the bits of the whole if the same
// variant computes all parts and every row's keys are counted from the same position.
TEST_F(CudaLaneTest, PartsGiveTheBitsOfTheWhole) {
  const uint64_t seed = FreshSeed();
  const std::unique_ptr<Lane> whole = MakeLane({.cut = {.parts_max = 1}});
  int same = 0;
  for (const int parts_min : {3, 8, 11}) {
    LaneTuning tuning;
    tuning.cut.parts_min = parts_min;
    const std::unique_ptr<Lane> lane = MakeLane(tuning);
    for (int kind = 0; kind < kCutKinds; ++kind) {
      for (const Layout layout : {Layout::kBHLD, Layout::kBLHD, Layout::kStrided}) {
        for (const DType dtype : {DType::kFloat16, DType::kFloat32}) {
          const ProblemSpec spec = CutSpec(kind, layout, dtype);
          OwnedAttention owned = MakeAttention(spec, seed);
          const std::string what = Describe(spec) + " in " + std::to_string(parts_min) +
                                   " ATTEND_TEST_SEED=" + std::to_string(seed);
          int64_t parts = 0, uncut = 0;
          const std::vector<std::byte> first = Answer(lane.get(), &owned, {}, &parts);
          ASSERT_FALSE(HasFailure()) << what;
          EXPECT_GE(parts, std::min(parts_min, 4)) << what;
          ASSERT_TRUE(first == Answer(lane.get(), &owned, {}, &parts)) << what;
          const KernelId kernel = Choose(owned.attention).kernel;
          const bool rows_move = parts > 4 && !owned.attention.problem.mask.unrestricted();
          if (rows_move || !SameVariants(owned.attention, kernel, tuning)) continue;
          ++same;
          ASSERT_TRUE(first == Answer(whole.get(), &owned, {}, &uncut)) << what;
          EXPECT_EQ(uncut, 0) << what;
        }
      }
    }
  }
  EXPECT_GT(same, 20);
}

// In every phase and place: an item with missing memory, and one that no kernel computes.
TEST_F(CudaLaneTest, AFailedItemFailsAlone) {
  const uint64_t seed = FreshSeed();
  for (const int parts_min : {1, 4}) {
    LaneTuning tuning;
    tuning.cut.parts_min = parts_min;
    std::unique_ptr<Lane> lane = MakeLane(tuning);
    std::vector<OwnedAttention> owned;
    std::vector<std::unique_ptr<PinnedAttention>> pinned;
    std::vector<WorkItem> items;
    for (int n : {0, 1, 2, 3, 4})
      owned.push_back(MakeAttention(MakeSpec(2, 4, 4, 50 + n, 70, 64, 64), seed));
    for (OwnedAttention& each : owned) {
      pinned.push_back(std::make_unique<PinnedAttention>(&each, &harness_->pinned()));
      items.push_back(pinned.back()->Item(Choose(each.attention)));
    }
    items[1].selection.kernel = KernelId::kCudaFlashSm90;  // it does not support float32
    if (parts_min == 1) {  // addresses of parts are checked before they are copied
      const auto to_null = [&](auto** pointer) {
        const auto offset = reinterpret_cast<uintptr_t>(*pointer) -
                            reinterpret_cast<uintptr_t>(items[3].inputs[0].data);
        *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(offset + 1024);
      };
      to_null(&items[3].attention.q.data);
      to_null(&items[3].attention.k.data);
      to_null(&items[3].attention.v.data);
      items[3].inputs = {{nullptr, owned[3].input.bytes + 1024}};
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Result<BatchOutcome> outcome = RunBatch(lane.get(), items);
      ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
      EXPECT_FALSE(outcome->device_lost);
      for (size_t n = 0; n < items.size(); ++n) {
        const bool fails = n == 1 || (n == 3 && parts_min == 1);
        EXPECT_EQ(outcome->statuses[n].code(), fails ? Code::kInternal : Code::kOk)
            << n << " of " << parts_min << ": " << outcome->statuses[n].ToString();
        if (fails) continue;
        pinned[n]->Fetch();
        const RowsReport report = CheckAllRows(owned[n].attention);
        EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
      }
    }
  }
}

// Lists of attentions longer than CUDA copies asynchronously from pageable memory.
TEST_F(CudaLaneTest, LongListsOfSequencesAreRight) {
  const uint64_t seed = FreshSeed();
  std::unique_ptr<Lane> lane = MakeLane({});
  std::mt19937_64 random(seed);
  for (const int sequences : {3000, 20, 30000}) {
    ProblemSpec spec = MakeSpec(1, 1, 1, 1, 1, 8, 8);
    spec.problem.packed = true;
    for (int n = 0; n < sequences; ++n) {
      spec.q_lengths.push_back(static_cast<int64_t>(random() % 3));
      spec.kv_lengths.push_back(static_cast<int64_t>(random() % 5));
    }
    OwnedAttention owned = MakeAttention(spec, seed);
    Answer(lane.get(), &owned, {}, nullptr);
    EXPECT_FALSE(HasFailure()) << sequences << " ATTEND_TEST_SEED=" << seed;
  }
}

// Large items back to back on some lanes, small batches on others: answers are right, and the same
// every time.
TEST_F(CudaLaneTest, LargeAndSmallBatchesRunSideBySide) {
  const uint64_t seed = FreshSeed();
  constexpr int kLanes = 4, kBatches = 25;
  std::vector<std::thread> threads;
  for (int n = 0; n < kLanes; ++n) {
    threads.emplace_back([&, n] {
      const bool large = n < 2;
      LaneTuning tuning;
      tuning.cut.parts_min = large ? 12 : 1;
      Result<std::unique_ptr<Lane>> lane = harness_->MakeLane(tuning);
      ASSERT_TRUE(lane.ok()) << lane.status().ToString();
      ProblemSpec spec = large ? MakeSpec(1, 8, 4, 2304, 2304, 128, 128, DType::kFloat16)
                               : MakeSpec(1, 8, 8, 128, 128, 64, 64, DType::kFloat16);
      spec.problem.mask.right = 0;
      OwnedAttention owned = MakeAttention(spec, seed + static_cast<uint64_t>(n));
      const PinnedAttention pinned(&owned, &harness_->pinned());
      const WorkItem item = pinned.Item(Choose(owned.attention));
      std::vector<std::byte> first;
      for (int batch = 0; batch < kBatches; ++batch) {
        const Result<BatchOutcome> outcome = RunBatch(lane->get(), {&item, 1});
        ASSERT_TRUE(outcome.ok() && outcome->statuses[0].ok());
        EXPECT_EQ(outcome->cut_parts >= 12, large);
        pinned.Fetch();
        if (batch == 0) {
          first = owned.OutputBytes();
          const RowsReport report =
              CheckRows(owned.attention, SampleRows(owned.attention, seed, 3e7));
          EXPECT_TRUE(report.ok) << report.detail << " ATTEND_TEST_SEED=" << seed;
        }
        ASSERT_TRUE(first == owned.OutputBytes()) << "lane " << n << " batch " << batch;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A batch's memory is available to other lanes after the lane's next batch: four lanes in turn need
// a share of which the device has three.
TEST_F(CudaLaneTest, LanesPassMemoryOnToEachOther) {
  size_t free_bytes = 0, total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const auto share = static_cast<int64_t>(free_bytes / 10 * 3);
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 2, 40, 40, 8, 8), FreshSeed());
  const WorkItem small = owned.Item(Choose(owned.attention));
  // Parts move the tensors only: what the span has beyond them is never read.
  WorkItem large = small;
  large.inputs = {{owned.input.data, share}};
  LaneTuning tuning;
  tuning.cut.parts_min = 2;
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int n = 0; n < 4; ++n) lanes.push_back(MakeLane(tuning, 0));
  for (int round = 0; round < 2; ++round) {
    for (const std::unique_ptr<Lane>& lane : lanes) {
      for (const WorkItem& item : {large, small}) {
        owned.ResetOutput();
        const Result<BatchOutcome> outcome = RunBatch(lane.get(), {&item, 1});
        ASSERT_TRUE(outcome.ok()) << outcome.status().ToString();
        ASSERT_TRUE(outcome->statuses[0].ok()) << outcome->statuses[0].ToString();
        EXPECT_EQ(outcome->cut_parts, 2);
        EXPECT_TRUE(CheckAllRows(owned.attention).ok);
      }
    }
  }
  // All at once they do not fit.
  bool refused = false;
  for (const std::unique_ptr<Lane>& lane : lanes) {
    const Result<BatchOutcome> outcome = RunBatch(lane.get(), {&large, 1});
    if (outcome.ok()) continue;
    refused = true;
    EXPECT_EQ(outcome.status().code(), Code::kResourceExhausted) << outcome.status().ToString();
  }
  EXPECT_TRUE(refused);
}

}  // namespace
}  // namespace attend::test

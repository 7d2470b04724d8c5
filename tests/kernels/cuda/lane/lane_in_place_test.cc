// SPDX-License-Identifier: Apache-2.0
//
// Items whose tensors lie in memory of the device: the same bits as copied, in one launch or in
// parts, after what the caller says must come before.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cuda/runtime/cuda_event.h"
#include "tests/kernels/support/cuda_run.h"
#include "tests/kernels/support/lane_harness.h"

namespace attend::test {
namespace {

using cuda::LaneTuning;

// Bits: which tensors lie on the device.
enum : unsigned { kQ = 1, kK = 2, kV = 4, kBias = 8, kArrays = 16, kOutput = 32, kEverything = 63 };

// The memory of an attention on the device beside that on the host. `owned` must outlive it.
class OnDeviceAttention {
 public:
  explicit OnDeviceAttention(OwnedAttention* owned)
      : owned_(owned), input_(owned->input.bytes), output_(owned->output.bytes) {}

  bool ok() const { return input_.get() != nullptr && output_.get() != nullptr; }

  // On `stream`, which must be waited for before the host's memory changes.
  cudaError_t Bring(cudaStream_t stream) {
    const cudaError_t error =
        cudaMemcpyAsync(input_.get(), owned_->input.data, static_cast<size_t>(owned_->input.bytes),
                        cudaMemcpyHostToDevice, stream);
    if (error != cudaSuccess) return error;
    return cudaMemcpyAsync(output_.get(), owned_->output.data,
                           static_cast<size_t>(owned_->output.bytes), cudaMemcpyHostToDevice,
                           stream);
  }
  cudaError_t Fill(int value) {
    return cudaMemset(input_.get(), value, static_cast<size_t>(owned_->input.bytes));
  }
  cudaError_t FetchOutput() {
    return cudaMemcpy(owned_->output.data, output_.get(), static_cast<size_t>(owned_->output.bytes),
                      cudaMemcpyDeviceToHost);
  }

  // Lengths and offsets stay on the host.
  WorkItem Item(unsigned tensors) {
    WorkItem item = owned_->Item(Selection{});
    Attention& a = item.attention;
    const auto move = [&](unsigned tensor, const HostSpan& from, char* to, auto** pointer) {
      if ((tensors & tensor) == 0 || *pointer == nullptr) return;
      const auto offset =
          reinterpret_cast<uintptr_t>(*pointer) - reinterpret_cast<uintptr_t>(from.data);
      *pointer = reinterpret_cast<std::remove_reference_t<decltype(*pointer)>>(to + offset);
    };
    move(kQ, owned_->input, input_.get(), &a.q.data);
    move(kK, owned_->input, input_.get(), &a.k.data);
    move(kV, owned_->input, input_.get(), &a.v.data);
    move(kBias, owned_->input, input_.get(), &a.bias.data);
    move(kArrays, owned_->input, input_.get(), &a.sinks);
    move(kArrays, owned_->input, input_.get(), &a.alibi_slopes);
    move(kOutput, owned_->output, output_.get(), &a.o.data);
    move(kOutput, owned_->output, output_.get(), &a.lse);
    item.in_place.Add({input_.get(), owned_->input.bytes});
    if ((tensors & kOutput) != 0) {
      item.in_place.Add({output_.get(), owned_->output.bytes});
      item.outputs = {};
    }
    return item;
  }

 private:
  OwnedAttention* const owned_;
  DeviceMemory input_;
  DeviceMemory output_;
};

std::vector<float> AllRows(const OwnedAttention& owned) {
  std::vector<float> all;
  for (int64_t b = 0; b < owned.attention.problem.batch; ++b) {
    const std::vector<float> rows = Rows(owned, b, SequenceOf(owned.attention, b).q_rows);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

class CudaInPlaceTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<LaneHarness>> harness = LaneHarness::Make();
    ASSERT_TRUE(harness.ok()) << harness.status().ToString();
    harness_ = std::move(*harness);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
  }

  std::unique_ptr<Lane> MakeLane(const LaneTuning& tuning) {
    Result<std::unique_ptr<Lane>> lane = harness_->MakeLane(tuning);
    EXPECT_TRUE(lane.ok()) << lane.status().ToString();
    return lane.ok() ? std::move(*lane) : nullptr;
  }

  // Runs it alone with the kernel chosen for its addresses; returns the number of parts.
  int64_t Run(Lane* lane, WorkItem item) {
    const Result<Selection> selection = harness_->Choose(item.attention);
    EXPECT_TRUE(selection.ok()) << selection.status().ToString();
    if (!selection.ok()) return -1;
    item.selection = *selection;
    const Result<BatchOutcome> outcome = RunBatch(lane, {&item, 1});
    EXPECT_TRUE(outcome.ok()) << outcome.status().ToString();
    if (!outcome.ok()) return -1;
    EXPECT_TRUE(outcome->statuses[0].ok()) << outcome->statuses[0].ToString();
    return outcome->cut_parts;
  }

  std::unique_ptr<LaneHarness> harness_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaInPlaceTest, GivesTheSameBitsAsCopies) {
  const uint64_t seed = FreshSeed();
  int64_t cut = 0, whole = 0;
  for (const int parts_min : {1, 5}) {
    LaneTuning tuning;
    tuning.cut.parts_min = parts_min;
    const std::unique_ptr<Lane> lane = MakeLane(tuning);
    for (uint64_t n = 0; n < 60; ++n) {
      const uint64_t each = seed + n;
      ProblemSpec spec = n % 3 == 0 ? AlignedSpec(each) : RandomSpec(each, 3e5);
      if (n % 4 == 1) spec = WithDropout(std::move(spec), each);
      OwnedAttention owned = MakeAttention(spec, each);
      const std::string what = Describe(owned.attention.problem) + " in " +
                               std::to_string(parts_min) +
                               " ATTEND_TEST_SEED=" + std::to_string(each);
      OnDeviceAttention device(&owned);
      ASSERT_TRUE(device.ok());
      Run(lane.get(), owned.Item(Selection{}));
      ASSERT_FALSE(HasFailure()) << what;
      const std::vector<float> wanted = AllRows(owned);
      for (const unsigned tensors : {unsigned{kEverything}, unsigned{kOutput}, kQ | kV | kArrays,
                                     static_cast<unsigned>(each) & kEverything}) {
        owned.ResetOutput();
        ASSERT_EQ(device.Bring(stream_), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        WorkItem item = device.Item(tensors);
        item.poison_output = n % 2 == 0;
        const int64_t parts = Run(lane.get(), item);
        ASSERT_FALSE(HasFailure()) << what << " tensors " << tensors;
        (parts > 0 ? cut : whole) += 1;
        if ((tensors & kOutput) != 0) {
          ASSERT_EQ(device.FetchOutput(), cudaSuccess);
          ASSERT_TRUE(owned.GuardsIntact()) << what << " tensors " << tensors;
        }
        ASSERT_TRUE(SameBits(wanted, AllRows(owned))) << what << " tensors " << tensors;
      }
    }
  }
  EXPECT_GT(cut, 20);
  EXPECT_GT(whole, 20);
}

// The tensors arrive on another stream, after a large copy; without the event the kernel would read
// NaN.
TEST_F(CudaInPlaceTest, WaitsForTheItemsEvent) {
  const uint64_t seed = FreshSeed();
  constexpr int64_t kBallast = int64_t{256} << 20;
  DeviceMemory ballast(kBallast);
  ASSERT_NE(ballast.get(), nullptr);
  for (const int parts_min : {1, 4}) {
    LaneTuning tuning;
    tuning.cut.parts_min = parts_min;
    const std::unique_ptr<Lane> lane = MakeLane(tuning);
    OwnedAttention owned =
        MakeAttention(MakeSpec(2, 4, 4, 300, 300, 64, 64, DType::kFloat16), seed);
    Run(lane.get(), owned.Item(Selection{}));
    const std::vector<float> wanted = AllRows(owned);
    owned.ResetOutput();
    const PinnedAttention pinned(&owned, &harness_->pinned());  // so that the copy is asynchronous
    ASSERT_TRUE(pinned.ok());
    const void* const source = pinned.Item(Selection{}).inputs[0].data;
    OnDeviceAttention device(&owned);
    ASSERT_TRUE(device.ok());
    ASSERT_EQ(device.Bring(stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    ASSERT_EQ(device.Fill(0xff), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    WorkItem item = device.Item(kEverything);
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    const cuda::CudaEvent before(event);
    for (int n = 0; n < 200; ++n) {
      ASSERT_EQ(cudaMemsetAsync(ballast.get(), n, kBallast, stream_), cudaSuccess);
    }
    ASSERT_EQ(cudaMemcpyAsync(item.in_place[0].data, source, static_cast<size_t>(owned.input.bytes),
                              cudaMemcpyHostToDevice, stream_),
              cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
    item.after[2] = &before;
    const int64_t parts = Run(lane.get(), item);
    EXPECT_EQ(parts > 0, parts_min > 1);
    ASSERT_EQ(device.FetchOutput(), cudaSuccess);
    EXPECT_TRUE(SameBits(wanted, AllRows(owned))) << "ATTEND_TEST_SEED=" << seed;
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
}

TEST_F(CudaInPlaceTest, RefusesForeignEventsAndUnusableMemory) {
  class OtherEvent final : public DeviceEvent {};
  const std::unique_ptr<Lane> lane = MakeLane({});
  OwnedAttention owned = MakeAttention(MakeSpec(2, 2, 2, 20, 20, 64, 64), FreshSeed());
  WorkItem item = owned.Item(*harness_->Choose(owned.attention));
  const OtherEvent other;
  item.after[0] = &other;
  EXPECT_EQ(RunBatch(lane.get(), {&item, 1}).status().code(), Code::kInvalidArgument);
  item.after = {};
  OnDeviceAttention device(&owned);
  ASSERT_TRUE(device.ok());
  WorkItem lengths = device.Item(kEverything);
  lengths.selection = item.selection;
  lengths.attention.kv_lengths = static_cast<const int64_t*>(lengths.in_place[0].data);
  EXPECT_EQ(RunBatch(lane.get(), {&lengths, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(RunBatch(lane.get(), {&item, 1}).ok()) << "a refusal leaves the lane free";
}

}  // namespace
}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0

#include "server/wire/early_input.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/support/messages.h"

namespace attend {
namespace {

constexpr int64_t kBudget = int64_t{64} << 20;
constexpr int64_t kEarlyMost = kBudget / 8;

class PlainAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t bytes) override { return std::aligned_alloc(256, bytes); }
  void Free(void* data, int64_t) override { std::free(data); }
  Status Register(void*, int64_t) override { return Status(); }
  void Unregister(void*, int64_t) override {}
};

class EarlyInputTest : public ::testing::Test {
 protected:
  // For a message of `bytes` bytes of which `begun` has arrived.
  std::shared_ptr<EarlyInput> Make(std::string_view begun, size_t bytes) {
    const std::vector<MessagePiece> pieces = {{begun.substr(0, begun.size() / 2), nullptr},
                                              {begun.substr(begun.size() / 2), nullptr}};
    return inputs_.Make(0, pieces, static_cast<int64_t>(bytes));
  }

  PlainAllocator allocator_;
  const std::unique_ptr<HostPool> pool_ = *HostPool::Make(allocator_, kBudget, TenantWeights{1});
  const EarlyInputs inputs_{*pool_, kEarlyMost};
};

// A complete message, decoded.
struct Decoded {
  explicit Decoded(const std::string& bytes) : pieces(bytes) {
    message.slices = pieces.spans();
    EXPECT_TRUE(ScanMessage(message.slices, message.scan).ok());
    EXPECT_TRUE(ParseMessage(arena, message).ok());
    EXPECT_TRUE(Validate(*message.fields, message.arrays(), validated).ok());
    plan = *PlanMemory(message, validated);
  }
  const test::Pieces pieces;
  google::protobuf::Arena arena;
  RequestMessage message;
  Validated validated;
  MemoryPlan plan;
};

TEST_F(EarlyInputTest, PlacesEveryTensorOnceTheFieldsHaveArrived) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int placed = 0;
  for (int round = 0; round < 200; ++round) {
    const std::string bytes = test::RandomWireProblem(seed + round).request.SerializeAsString();
    const Decoded whole(bytes);
    if (whole.plan.input_bytes == 0) continue;
    if (HostPool::BlockBytes(whole.plan.input_bytes) > kEarlyMost) {
      EXPECT_EQ(Make(bytes, bytes.size()), nullptr) << "more than all early inputs may have";
      continue;
    }
    ++placed;
    const auto first = static_cast<size_t>(whole.message.scan.raw[0].offset);
    EXPECT_EQ(Make(bytes.substr(0, random() % first), bytes.size()), nullptr);
    const size_t cut = first + random() % (bytes.size() - first + 1);
    const std::shared_ptr<EarlyInput> early = Make(bytes.substr(0, cut), bytes.size());
    ASSERT_NE(early, nullptr);
    ASSERT_EQ(std::ssize(early->places), whole.message.scan.raw_count);
    for (size_t i = 0; i < early->places.size(); ++i) {
      EXPECT_EQ(early->places[i].begin, whole.message.scan.raw[i].offset);
      EXPECT_EQ(early->places[i].bytes, whole.message.scan.raw[i].bytes);
    }
    ASSERT_TRUE(early->Fits(whole.message.scan, whole.plan, whole.validated));
    const HostBlock block = early->TakeBlock();
    EXPECT_EQ(block.bytes(), whole.plan.input_bytes);
    EXPECT_FALSE(early->Fits(whole.message.scan, whole.plan, whole.validated));
  }
  EXPECT_GT(placed, 50);
  EXPECT_EQ(pool_->used_bytes(), 0);
}

TEST_F(EarlyInputTest, DoesNotFitAnotherMessage) {
  const std::string bytes = test::PlainWireProblem(1).request.SerializeAsString();
  const std::shared_ptr<EarlyInput> early = Make(bytes, bytes.size());
  ASSERT_NE(early, nullptr);
  const auto fits = [&](auto&& change) {
    Decoded other(bytes);
    change(other);
    return early->Fits(other.message.scan, other.plan, other.validated);
  };
  EXPECT_TRUE(fits([](Decoded&) {}));
  EXPECT_FALSE(fits([](Decoded& d) { ++d.message.scan.raw[1].offset; }));
  EXPECT_FALSE(fits([](Decoded& d) { --d.message.scan.raw[2].bytes; }));
  EXPECT_FALSE(fits([](Decoded& d) { ++d.message.scan.raw_count; }));
  EXPECT_FALSE(fits([](Decoded& d) { d.plan.input_bytes += 256; }));
  EXPECT_FALSE(fits([](Decoded& d) { std::swap(d.plan.tensors[0], d.plan.tensors[1]); }));
}

TEST_F(EarlyInputTest, AllocatesNothingForMisplacedTensors) {
  const test::WireProblem problem = test::PlainWireProblem(1);
  const std::string bytes = problem.request.SerializeAsString();
  EXPECT_EQ(Make(bytes, bytes.size() + 1), nullptr) << "something follows the tensors";
  EXPECT_EQ(Make(bytes, bytes.size() - 1), nullptr);
  const auto refuses = [&](auto&& change) {
    v1::AttendRequest request = problem.request;
    change(request);
    const std::string changed = request.SerializeAsString();
    return Make(changed, changed.size()) == nullptr;
  };
  EXPECT_FALSE(refuses([](v1::AttendRequest&) {}));
  EXPECT_TRUE(refuses([](v1::AttendRequest& r) { r.add_sessions()->set_session("s"); }));
  EXPECT_TRUE(refuses([](v1::AttendRequest& r) { r.mutable_raw(0)->pop_back(); }));
  EXPECT_TRUE(refuses([](v1::AttendRequest& r) { r.mutable_raw(2)->push_back('x'); }));
  EXPECT_TRUE(refuses([](v1::AttendRequest& r) { r.clear_raw(); }));
  EXPECT_TRUE(refuses([](v1::AttendRequest& r) { r.clear_q(); }));
  EXPECT_TRUE(refuses(
      [](v1::AttendRequest& r) { r.mutable_k()->mutable_shared_memory()->set_region("r"); }));
  v1::AttendRequest fields = problem.request, tensors;
  fields.clear_raw();
  *tensors.mutable_raw() = problem.request.raw();
  std::mt19937_64 random(1);
  for (int i = 0; i < 100; ++i) {
    const std::string ordered =
        test::Shuffled(fields.SerializeAsString(), random) + tensors.SerializeAsString();
    for (const std::string& shuffled : {ordered, test::Shuffled(bytes, random)}) {
      const std::shared_ptr<EarlyInput> early = Make(shuffled, shuffled.size());
      if (early == nullptr) {
        EXPECT_NE(shuffled, ordered) << "the tensors are last";
        continue;
      }
      const Decoded whole(shuffled);
      EXPECT_TRUE(early->Fits(whole.message.scan, whole.plan, whole.validated));
    }
  }
  EXPECT_EQ(pool_->used_bytes(), 0);
}

TEST_F(EarlyInputTest, AllEarlyInputsAreBoundedTogether) {
  const std::string bytes = test::PlainWireProblem(1, 1024, 64).request.SerializeAsString();
  std::vector<std::shared_ptr<EarlyInput>> all;
  while (auto early = Make(bytes, bytes.size())) all.push_back(std::move(early));
  EXPECT_EQ(std::ssize(all), kEarlyMost / std::ssize(bytes));
  {
    const HostBlock block = all.back()->TakeBlock();
    all.pop_back();
    EXPECT_NE(Make(bytes, bytes.size()), nullptr) << "a whole request's does not count";
  }
  all.clear();
  EXPECT_EQ(pool_->used_bytes(), 0);
}

TEST_F(EarlyInputTest, WithoutMemoryThereIsNoEarlyInput) {
  const HostBlock rest = *pool_->Take(0, kBudget);
  const std::string bytes = test::PlainWireProblem(1).request.SerializeAsString();
  EXPECT_EQ(Make(bytes, bytes.size()), nullptr);
}

}  // namespace
}  // namespace attend

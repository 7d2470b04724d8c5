// SPDX-License-Identifier: Apache-2.0

#include "client/wire/borrowed_slice.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace attend::client {
namespace {

class Owner {
 public:
  grpc::Slice Slice() {
    TensorRef tensor(DType::kFloat32, {1}, &number_, sizeof(number_));
    tensor.owner = std::shared_ptr<const void>(&number_, [this](const void*) { ++freed_; });
    return BorrowedSlice(tensor, nullptr);
  }
  int freed() const { return freed_; }

 private:
  float number_ = 0;
  int freed_ = 0;
};

TEST(BorrowedSlice, KeepsItsOwnerUntilItsLastCopyIsDestroyed) {
  Owner owner;
  std::optional<grpc::Slice> one(owner.Slice());
  std::optional<grpc::Slice> other(*one);
  one.reset();
  EXPECT_EQ(owner.freed(), 0);
  other.reset();
  EXPECT_EQ(owner.freed(), 1);
}

TEST(BorrowedSlice, AGateDelaysDeletersOfItsThread) {
  Owner owner, others;
  std::optional<ReleasedMemory> released;
  {
    ReleaseGate gate;
    for (int n = 0; n < 3; ++n) (void)owner.Slice();
    std::thread([&] { (void)others.Slice(); }).join();
    EXPECT_EQ(owner.freed(), 0);
    EXPECT_EQ(others.freed(), 1);
    released.emplace(gate.End());
    (void)owner.Slice();  // the gate is open
    EXPECT_EQ(owner.freed(), 1);
  }
  EXPECT_FALSE(released->empty());
  EXPECT_EQ(owner.freed(), 1);
  released.reset();
  EXPECT_EQ(owner.freed(), 4);
}

TEST(BorrowedSlice, TheInnermostGateDelaysDeleters) {
  Owner owner;
  ReleaseGate outer;
  {
    ReleaseGate inner;
    (void)owner.Slice();
  }
  EXPECT_EQ(owner.freed(), 1);
  (void)owner.Slice();
  EXPECT_EQ(owner.freed(), 1);
  EXPECT_FALSE(outer.End().empty());
  EXPECT_EQ(owner.freed(), 2);
}

}  // namespace
}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_slices.h"

#include <gmock/gmock.h>
#include <grpc/slice.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// gRPC's own, not in its headers: set while the thread is inside a call of gRPC's core.
extern __thread void* grpc_exec_ctx __asm__("_ZN9grpc_core7ExecCtx9exec_ctx_E");

namespace attend {
namespace {

// What became of the slices of a message.
struct Slices {
  int freed = 0;
  int freed_outside = 0;  // of gRPC's core
};

void Free(void* user) {
  Slices& slices = *static_cast<Slices*>(user);
  ++slices.freed;
  slices.freed_outside += grpc_exec_ctx == nullptr ? 1 : 0;
}

// A message of `count` slices with these bytes each.
grpc::ByteBuffer Message(std::string& bytes, int count, Slices& slices) {
  std::vector<grpc::Slice> list;
  for (int i = 0; i < count; ++i) {
    list.emplace_back(grpc_slice_new_with_user_data(bytes.data(), bytes.size(), Free, &slices),
                      grpc::Slice::STEAL_REF);
  }
  return grpc::ByteBuffer(list.data(), list.size());
}

class MessageSlicesTest : public testing::Test {
 protected:
  void TakeMessage(int count) {
    grpc::ByteBuffer message = Message(bytes_, count, freed_);
    ASSERT_TRUE(slices_.Take(message));
    EXPECT_FALSE(message.Valid());
    EXPECT_EQ(slices_.bytes(), std::ssize(bytes_) * count);
  }
  void ExpectFreed(int count) const {
    EXPECT_EQ(freed_.freed, count);
    EXPECT_EQ(freed_.freed_outside, 0);
  }

  std::string bytes_ = std::string(4096, 'x');  // gRPC copies what is small
  Slices freed_;
  MessageSlices slices_;
};

TEST_F(MessageSlicesTest, ReleasedInsideOfGrpc) {
  TakeMessage(3);
  EXPECT_EQ(slices_.spans().size(), 3u);
  ExpectFreed(0);
  slices_.Release();
  ExpectFreed(3);
}

TEST_F(MessageSlicesTest, DestroyedInsideOfGrpc) {
  TakeMessage(3);
  {
    MessageSlices moved = std::move(slices_);
    EXPECT_EQ(moved.spans()[2].data(), reinterpret_cast<const uint8_t*>(bytes_.data()));
    ExpectFreed(0);
  }
  ExpectFreed(3);
}

TEST_F(MessageSlicesTest, TakenAndKept) {
  TakeMessage(3);
  {
    const HeldSlices held = slices_.TakeSlices();
    slices_ = MessageSlices();
    EXPECT_EQ(held.list().size(), 3u);
    ExpectFreed(0);
  }
  ExpectFreed(3);
}

TEST_F(MessageSlicesTest, TheNextMessageFreesTheLast) {
  TakeMessage(2);
  slices_ = MessageSlices();
  ExpectFreed(2);
  TakeMessage(3);
  slices_.Release();
  ExpectFreed(5);
}

TEST_F(MessageSlicesTest, WhatIsLentIsReadWhereItLiesUntilItIsOwned) {
  const auto text = [this] {
    std::string all;
    for (const ByteSpan span : slices_.spans()) all.append(span.begin(), span.end());
    return all;
  };
  for (const bool more : {false, true}) {
    slices_.Lend(bytes_);
    EXPECT_TRUE(slices_.lent());
    EXPECT_EQ(slices_.bytes(), std::ssize(bytes_));
    EXPECT_EQ(slices_.spans()[0].data(), reinterpret_cast<const uint8_t*>(bytes_.data()));
    const uint8_t appended[] = {'y', 'z'};
    if (more) slices_.Append(appended);
    const std::string expected = bytes_ + (more ? "yz" : "");
    EXPECT_EQ(text(), expected);
    slices_.Own();
    EXPECT_FALSE(slices_.lent());
    std::fill(bytes_.begin(), bytes_.end(), '?');
    MessageSlices moved = std::move(slices_);
    slices_ = std::move(moved);
    EXPECT_EQ(text(), expected);
    slices_.Release();
    EXPECT_TRUE(slices_.spans().empty());
    bytes_.assign(4096, 'x');
  }
}

TEST_F(MessageSlicesTest, ManySmallOnesBecomeOne) {
  bytes_.resize(64);
  TakeMessage(1000);
  ASSERT_EQ(slices_.spans().size(), 1u);
  EXPECT_EQ(slices_.spans()[0].size(), 64000u);
  ExpectFreed(1000);
}

}  // namespace
}  // namespace attend

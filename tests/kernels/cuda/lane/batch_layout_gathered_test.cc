// SPDX-License-Identifier: Apache-2.0
//
// The copies that a lane makes of gathered inputs. Needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/cuda/lane/batch_layout.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

void* Address(uintptr_t value) { return reinterpret_cast<void*>(value); }

WorkItem ItemAt(uintptr_t in, int64_t bytes) {
  WorkItem item;
  item.inputs.Add({Address(in), bytes});
  return item;
}

TEST(AddInputCopies, CopiesPiecesAndTheBytesBetweenThem) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    // Two spans, whose bytes are in place or, in part, elsewhere.
    std::vector<char> spans[2], elsewhere(6000), wanted[2], places[2];
    WorkItem item;
    cuda::ItemPlace place;
    std::vector<HostPiece> pieces;
    size_t used = 0;
    for (int i = 0; i < 2; ++i) {
      spans[i].resize(1 + random() % 3000);
      for (char& byte : spans[i]) byte = static_cast<char>(random());
      wanted[i] = spans[i];
      places[i].assign(spans[i].size(), 7);
    }
    if (spans[1].data() < spans[0].data()) std::swap(spans[0], spans[1]);
    for (int i = 0; i < 2; ++i) {
      wanted[i] = spans[i];
      places[i].assign(spans[i].size(), 7);
      for (size_t at = random() % 2 * (random() % 200); at < spans[i].size() && round > 0;) {
        const size_t bytes = std::min(spans[i].size() - at, size_t{random() % 700});
        std::copy_n(spans[i].data() + at, bytes, elsewhere.data() + used);
        std::fill_n(spans[i].data() + at, bytes, 99);  // not to be read
        pieces.push_back(
            {elsewhere.data() + used, spans[i].data() + at, static_cast<int64_t>(bytes)});
        used += bytes;
        at += bytes + random() % 3 * (random() % 90);
      }
      item.inputs.Add({spans[i].data(), static_cast<int64_t>(spans[i].size())});
      place.inputs[i] = places[i].data();
    }
    item.gathered = pieces;
    const Status status = cuda::CheckGathered(item);
    ASSERT_TRUE(status.ok()) << status.ToString() << " seed " << seed;
    std::vector<cuda::InputCopy> copies;
    cuda::AddInputCopies(item, place, &copies);
    for (const cuda::InputCopy& copy : copies) {
      const auto offset = static_cast<size_t>(copy.from - elsewhere.data());
      EXPECT_EQ(copy.mapped, offset < elsewhere.size());
      std::copy_n(copy.from, copy.bytes, copy.to);
    }
    for (int i = 0; i < 2; ++i) ASSERT_TRUE(places[i] == wanted[i]) << round << " seed " << seed;
  }
}

TEST(CheckGathered, RefusesPiecesOutsideTheSpansOrOverlapping) {
  char data[8] = {};
  const auto check = [&](std::initializer_list<HostPiece> pieces) {
    WorkItem item = ItemAt(1000, 100);
    item.gathered = {pieces.begin(), pieces.size()};
    return cuda::CheckGathered(item);
  };
  EXPECT_TRUE(check({{data, Address(1000), 60}, {data, Address(1060), 40}}).ok());
  EXPECT_EQ(check({{data, Address(999), 8}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({{data, Address(1099), 2}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({{data, Address(2000), 8}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({{data, Address(1000), -1}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({{nullptr, Address(1000), 8}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(check({{data, Address(1000), 8}, {data, Address(1007), 8}}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(check({{data, Address(1050), 8}, {data, Address(1000), 8}}).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace attend::test

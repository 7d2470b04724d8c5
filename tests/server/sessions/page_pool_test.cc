// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

constexpr int64_t kSlabBytes = 64 * 1024;

class PagePoolTest : public ::testing::Test {
 protected:
  explicit PagePoolTest(int64_t slabs = 4)
      : memory_(test::MakeBlock(slabs * kSlabBytes + kPageUnitBytes)),
        pool_({memory_.get(), slabs * kSlabBytes + kPageUnitBytes}, kSlabBytes) {}

  std::vector<PageNumber> MustTake(int64_t page_bytes, int64_t count) {
    std::vector<PageNumber> pages;
    EXPECT_LE(count, pool_.Room(page_bytes));
    pool_.Take(page_bytes, count, pages);
    EXPECT_EQ(std::ssize(pages), count);
    taken_.insert(taken_.end(), pages.begin(), pages.end());
    EXPECT_TRUE(pool_.Consistent(taken_));
    return pages;
  }

  test::Block memory_;
  PagePool pool_;
  std::vector<PageNumber> taken_;
};

TEST_F(PagePoolTest, PagesAreWithinTheMemoryAndDoNotOverlap) {
  std::set<char*> begins;
  for (const int64_t bytes : {int64_t{256}, int64_t{20 * 1024 / 256 * 256}, int64_t{768}}) {
    for (const PageNumber page : MustTake(bytes, 3)) {
      EXPECT_NE(page, 0);
      char* const data = pool_.data(page);
      EXPECT_GE(data, pool_.base());
      EXPECT_LE(data + bytes, pool_.base() + 4 * kSlabBytes + kPageUnitBytes);
      const auto next = begins.insert(data).first;
      std::fill(data, data + bytes, static_cast<char>(begins.size()));
      EXPECT_TRUE(next == begins.begin() || *std::prev(next) < data);
    }
  }
  int64_t charged = 0;
  for (const int64_t bytes : {256, 20 * 1024, 768}) charged += 3 * pool_.Charge(bytes);
  EXPECT_EQ(pool_.stats().used_bytes, charged);
  EXPECT_GE(charged, 3 * (256 + 20 * 1024 + 768));
}

// Memory used by one shape serves another once it is free, for any sizes.
TEST_F(PagePoolTest, AnyShapeCanUseAllMemory) {
  for (const int64_t bytes : {int64_t{512}, kSlabBytes, int64_t{24 * 1024}, int64_t{256}}) {
    const int64_t room = pool_.Room(bytes);
    EXPECT_EQ(room, 4 * (kSlabBytes / bytes));
    const std::vector<PageNumber> pages = MustTake(bytes, room);
    EXPECT_EQ(pool_.Room(bytes), 0);
    EXPECT_EQ(pool_.Room(256), 0) << "every slab serves the other size";
    pool_.Give(pages);
    taken_.clear();
    EXPECT_TRUE(pool_.Consistent({}));
    EXPECT_EQ(pool_.stats().free_bytes, pool_.stats().total_bytes);
  }
}

TEST_F(PagePoolTest, APageLargerThanASlabIsRefused) { EXPECT_EQ(pool_.Room(2 * kSlabBytes), 0); }

TEST_F(PagePoolTest, LeakedAndPrematurelyFreedPagesAreDetected) {
  const std::vector<PageNumber> pages = MustTake(4096, 3);
  EXPECT_TRUE(pool_.Consistent({pages[1], pages[2], pages[0]}));
  EXPECT_FALSE(pool_.Consistent({pages[0], pages[1]}));
  EXPECT_FALSE(pool_.Consistent({pages[0], pages[1], pages[1], pages[2]}));
  pool_.Give(std::span(pages).first(1));
  EXPECT_FALSE(pool_.Consistent(pages));
  EXPECT_TRUE(pool_.Consistent({pages[1], pages[2]}));
  pool_.Give(std::span(pages).last(2));
  EXPECT_TRUE(pool_.Consistent({}));
}

TEST(PagePoolSizeTest, MemoryBelowASlabHoldsNoPages) {
  const test::Block memory = test::MakeBlock(kSlabBytes);
  for (const int64_t bytes : {int64_t{0}, kPageUnitBytes, kSlabBytes}) {
    PagePool pool({memory.get(), bytes}, kSlabBytes);
    EXPECT_EQ(pool.Room(256), 0);
    EXPECT_TRUE(pool.Consistent({}));
  }
}

}  // namespace
}  // namespace attend

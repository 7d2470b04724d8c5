// SPDX-License-Identifier: Apache-2.0
//
// Named cases of branches; for random histories see session_model_test.

#include "server/sessions/page_tree.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "tests/kernels/support/problems.h"

namespace attend {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kPages = 32;
using Branch = PageTree::Branch;

// Two tenants: 8 pages are reserved for each, 16 are common. Sessions have two layers.
class PageTreeTest : public ::testing::Test {
 protected:
  ~PageTreeTest() override { EXPECT_TRUE(tree_.Consistent({{}, {}}, pins_)); }

  Branch* Plant(int tenant, int64_t pages, bool pinned = false) {
    Branch* const leaf = tree_.Plant(tenant, bytes_, pinned, ++now_);
    Grow(*leaf, pages);
    return leaf;
  }
  void Grow(Branch& leaf, int64_t pages) {
    for (size_t layer = 0; layer < 2; ++layer) Grow(leaf, layer, pages);
  }
  void Grow(Branch& leaf, size_t layer, int64_t count) {
    std::vector<PageNumber> pages;
    ASSERT_TRUE(tree_.MakeRoom(leaf.tenant, kPageBytes, count, now_));
    tree_.Take(leaf.tenant, kPageBytes, count, pages);
    PageTree::Reserve(leaf, layer, count);
    tree_.Append(leaf, layer, pages);
  }
  Branch* Fork(Branch& leaf, int64_t pages) { return tree_.Fork(leaf, pages, leaf.kept, ++now_); }
  void Pin(Branch& leaf) {
    tree_.Pin(leaf);
    ++pins_;
  }
  void Unpin(Branch& leaf) {
    tree_.Unpin(leaf);
    --pins_;
  }
  // Pages of each layer.
  int64_t Pages(Branch& leaf) {
    tree_.Settle(leaf);
    EXPECT_EQ(PageTree::PagesOf(leaf, 0), PageTree::PagesOf(leaf, 1));
    return PageTree::PagesOf(leaf, 0);
  }
  std::vector<PageNumber> Table(const Branch& leaf) {
    std::vector<PageNumber> table(kPages);
    table.resize(PageTree::CopyPages(leaf, 0, table.data()) - table.data());
    return table;
  }
  int64_t Used() { return tree_.stats().used_bytes / kPageBytes; }
  int64_t Shared() { return tree_.stats().shared_bytes / kPageBytes; }

  test::Block memory_ = test::MakeBlock(kPages * kPageBytes + kPageUnitBytes);
  Ledger lists_{int64_t{1} << 40, {1, 1}};
  PageTree tree_{
      {memory_.get(), kPages* kPageBytes + kPageUnitBytes}, 4 * kPageBytes, {}, {1, 1}, lists_};
  std::shared_ptr<const std::vector<int64_t>> bytes_ =
      std::make_shared<const std::vector<int64_t>>(2, kPageBytes);
  TimePoint now_{};
  int64_t pins_ = 0;
};

TEST_F(PageTreeTest, ForksShareTheirPagesUntilTheLastOneLeaves) {
  Branch* const one = Plant(0, 5);
  const std::vector<PageNumber> all = Table(*one);
  Branch* const two = Fork(*one, 3);
  Branch* const three = Fork(*two, 2);
  Grow(*three, 1);
  EXPECT_EQ(Table(*one), all);
  EXPECT_EQ(Table(*two), std::vector(all.begin(), all.begin() + 3));
  EXPECT_EQ(Table(*three).size(), 3u);
  EXPECT_EQ(PageTree::PageAt(*three, 0, 1), all[1]);
  EXPECT_EQ(Used(), 12);
  EXPECT_EQ(Shared(), 6);
  tree_.Leave(*one);
  EXPECT_EQ(Used(), 8) << "its last two of each layer";
  EXPECT_EQ(Shared(), 4) << "the third page is one session's alone";
  tree_.Leave(*three);
  EXPECT_EQ(Shared(), 0);
  EXPECT_EQ(Table(*two), std::vector(all.begin(), all.begin() + 3));
  tree_.Leave(*two);
  EXPECT_EQ(Used(), 0);
  EXPECT_EQ(lists_.held(), 0);
}

TEST_F(PageTreeTest, PagesBeingReadStayWhateverHappensToTheSession) {
  Branch* leaf = Plant(0, 6);
  const std::vector<PageNumber> all = Table(*leaf);
  Branch* const fork = Fork(*leaf, 4);
  Branch* const read = leaf;
  Pin(*read);
  const int64_t kept[] = {5, 5};
  leaf = tree_.Cut(*leaf, kept, 0);
  EXPECT_NE(leaf, read);
  EXPECT_EQ(Table(*leaf), std::vector(all.begin(), all.begin() + 5));
  EXPECT_EQ(Used(), 12);
  const int64_t fewer[] = {2, 2};
  leaf = tree_.Cut(*leaf, fewer, 0);  // into the pages shared with the fork
  EXPECT_EQ(Used(), 12);
  tree_.Leave(*fork);
  tree_.Leave(*leaf);
  EXPECT_EQ(Used(), 12) << "it is still read";
  Unpin(*read);
  EXPECT_EQ(Used(), 0);
}

TEST_F(PageTreeTest, ACutOfUnreadPagesFreesThemAtOnce) {
  Branch* leaf = Plant(0, 6);
  Grow(*leaf, 1, 2);
  const int64_t kept[] = {5, 6};
  EXPECT_EQ(tree_.Cut(*leaf, kept, 0), leaf);
  EXPECT_EQ(Used(), 11);
  Branch* const fork = Fork(*leaf, 5);
  const int64_t fewer[] = {2, 2};
  leaf = tree_.Cut(*leaf, fewer, 1);
  EXPECT_EQ(Used(), 10);
  EXPECT_EQ(Pages(*leaf), 2);
  EXPECT_EQ(Pages(*fork), 5);
}

TEST_F(PageTreeTest, TheLeastRecentlyUsedIsEvictedFirstFromItsEnd) {
  Branch* const oldest = Plant(0, 4);
  Branch* const older = Plant(0, 4);
  Branch* const newest = Plant(0, 4);
  tree_.Touch(*oldest, ++now_);
  Grow(*newest, 2);
  EXPECT_EQ(Pages(*older), 2);
  EXPECT_EQ(Pages(*oldest), 4);
  EXPECT_EQ(tree_.evictions().evictions_own, 2) << "one for each layer that grew";
  EXPECT_EQ(tree_.evictions().evicted_bytes, 4 * kPageBytes);
}

TEST_F(PageTreeTest, ASharedPrefixIsEvictedAfterAllItsSuffixes) {
  Branch* const one = Plant(0, 3);
  Branch* const two = Fork(*one, 3);
  Branch* const three = Fork(*one, 2);
  Grow(*two, 1);
  Grow(*three, 1);  // 5 pages in each layer
  Branch* const needy = Plant(0, 7);
  EXPECT_EQ(Used(), 24);
  EXPECT_EQ(Pages(*one), 3);
  Grow(*needy, 1);
  EXPECT_EQ(Pages(*two), 3) << "its own, and used longer ago than the third's";
  Grow(*needy, 1);
  EXPECT_EQ(Pages(*one), 2) << "it ends where the others go on";
  EXPECT_EQ(Pages(*two), 2);
  EXPECT_EQ(Pages(*three), 3);
  Grow(*needy, 2);
  for (Branch* const each : {one, two, three}) EXPECT_EQ(Pages(*each), 1);
  Grow(*needy, 1);
  for (Branch* const each : {one, two, three}) EXPECT_EQ(Pages(*each), 0);
}

TEST_F(PageTreeTest, PagesBeforeReadOrPinnedOnesAreNotEvicted) {
  for (const bool pinned : {false, true}) {
    Branch* const origin = Plant(0, 6, pinned);
    Branch* const fork = Fork(*origin, 4);
    if (!pinned) Pin(*fork);
    const int64_t most = pinned ? 12 : 16;  // 12 are free
    EXPECT_FALSE(tree_.MakeRoom(0, kPageBytes, most + 1, now_));
    EXPECT_EQ(Pages(*origin), 6) << "what is refused evicts nothing";
    EXPECT_TRUE(tree_.MakeRoom(0, kPageBytes, most, now_));
    EXPECT_EQ(Pages(*fork), 4);
    EXPECT_EQ(Pages(*origin), pinned ? 6 : 4) << "what follows is the origin's own";
    if (!pinned) Unpin(*fork);
    tree_.Leave(*origin);
    tree_.Leave(*fork);
  }
}

TEST_F(PageTreeTest, OtherTenantsLoseOnlyPagesBeyondTheirPart) {
  Branch* const greedy = Plant(0, 12);  // 24 pages: all that it may have
  EXPECT_EQ(tree_.ledger().Room(1), 8 * kPageBytes);
  Branch* const needy = Plant(1, 4);
  EXPECT_EQ(Pages(*greedy), 12) << "the other's own part was free";
  Grow(*needy, 3);
  EXPECT_EQ(Pages(*greedy), 9);
  Pin(*needy);
  EXPECT_FALSE(tree_.MakeRoom(1, kPageBytes, 11, now_));
  EXPECT_EQ(Pages(*greedy), 9) << "where that is too little, nothing goes";
  EXPECT_TRUE(tree_.MakeRoom(1, kPageBytes, 10, now_));
  EXPECT_EQ(Pages(*greedy), 4);
  EXPECT_EQ(tree_.evictions().evictions_others, 3);
  Unpin(*needy);
}

TEST_F(PageTreeTest, ATenantsLimitEvictsOnlyItsOwnPages) {
  Plant(1, 8);
  Branch* const own = Plant(0, 4);
  EXPECT_FALSE(tree_.EvictOwn(0, 9 * kPageBytes, now_));
  EXPECT_EQ(Pages(*own), 4);
  EXPECT_TRUE(tree_.EvictOwn(0, 3 * kPageBytes, now_));
  EXPECT_EQ(Pages(*own), 2) << "of all layers alike";
}

// As deep as forks of forks can get; in debug builds the destructor checks all of it.
TEST_F(PageTreeTest, AMaximalChainOfForksKeepsItsPages) {
  std::vector<Branch*> leaves = {tree_.Plant(0, bytes_, false, ++now_)};
  for (int64_t n = 0; n < 12; ++n) {
    Grow(*leaves.back(), 1);
    leaves.push_back(Fork(*leaves.back(), n + 1));
  }
  EXPECT_EQ(Used(), 24);
  EXPECT_EQ(Pages(*leaves.back()), 12);
  const std::vector<PageNumber> last = Table(*leaves.back());
  for (size_t n = 0; n + 1 < leaves.size(); ++n) tree_.Leave(*leaves[n]);
  EXPECT_EQ(Table(*leaves.back()), last);
  EXPECT_EQ(Shared(), 0) << "all branches are joined to the last";
  EXPECT_EQ(leaves.back()->begin, 0);
}

}  // namespace
}  // namespace attend

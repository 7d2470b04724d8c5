// SPDX-License-Identifier: Apache-2.0
//
// The order of tiles: each is one tile of its group, heads that share K and V stay together, long
// tiles come before short ones, and blocks that claim them one by one end together.

#include "kernels/cuda/ragged/tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace attend::test {
namespace {

using cuda::TileGroup;
using cuda::TileWork;

struct Case {
  int64_t batch, heads_q, heads_kv, length, dim;
  int rows;
  bool causal = true;

  std::string Name() const {
    return "B" + std::to_string(batch) + " H" + std::to_string(heads_q) + "/" +
           std::to_string(heads_kv) + " L" + std::to_string(length) + " D" + std::to_string(dim) +
           " rows " + std::to_string(rows) + (causal ? " causal" : " full");
  }
};

Problem ProblemOf(const Case& c) {
  Problem p;
  p.dtype = DType::kFloat16;
  p.batch = c.batch;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.len_q = p.len_k = c.length;
  p.dim = p.dim_v = c.dim;
  p.scale = 1.0f;
  if (c.causal) p.mask.right = 0;
  return p;
}

TileGroup GroupOf(const Case& c) {
  TileGroup group;
  group.first_tile = 7;
  group.b = 3;
  group.heads = static_cast<int32_t>(c.batch * c.heads_q);
  cuda::OrderTiles(ProblemOf(c), c.length, c.length, c.rows, group);
  return group;
}

std::vector<TileWork> TilesOf(const Case& c) {
  const TileGroup group = GroupOf(c);
  std::vector<TileWork> tiles(static_cast<size_t>(group.heads) * group.row_tiles);
  for (size_t n = 0; n < tiles.size(); ++n) {
    cuda::PlaceTile(group, c.heads_q, group.first_tile + static_cast<int>(n), c.rows, tiles[n]);
  }
  return tiles;
}

const Case kShapes[] = {
    {1, 1, 1, 1, 64, 64},
    {2, 3, 3, 300, 128, 128},
    {5, 6, 2, 1000, 64, 192},
    {3, 35, 5, 777, 96, 192},
    {1, 16, 16, 16384, 128, 192},
    {7, 4, 1, 130, 256, 128},
    {4, 8, 8, 2048, 64, 256, false},
    {1, 2, 1, 100000, 128, 128},
};

TEST(TileOrder, DividesByPowersOfTwoAndOthers) {
  for (const int b : {1, 2, 3, 4, 5, 7, 8, 96, 128, 1000, 1 << 16, (1 << 30) - 1, 1 << 30}) {
    for (const int a : {0, 1, 2, 6, 7, 8, 999, 1000, 65535, 65536, (1 << 30) - 1, 1 << 30}) {
      const cuda::Quotient quotient = cuda::Divide(a, b);
      EXPECT_EQ(quotient.whole, a / b) << a << " / " << b;
      EXPECT_EQ(quotient.rest, a % b) << a << " / " << b;
    }
  }
}

TEST(TileOrder, VisitsEveryTileOfEveryHeadOnce) {
  for (const Case& c : kShapes) {
    std::set<std::tuple<int, int, int>> seen;
    for (const TileWork& tile : TilesOf(c)) {
      EXPECT_TRUE(tile.b >= 3 && tile.b < 3 + c.batch) << c.Name();
      EXPECT_TRUE(tile.h >= 0 && tile.h < c.heads_q) << c.Name();
      EXPECT_TRUE(tile.row_begin >= 0 && tile.row_begin < c.length) << c.Name();
      EXPECT_EQ(tile.row_begin % c.rows, 0) << c.Name();
      EXPECT_TRUE(seen.emplace(tile.b, tile.h, tile.row_begin).second) << c.Name();
    }
    const int64_t row_tiles = (c.length + c.rows - 1) / c.rows;
    EXPECT_EQ(static_cast<int64_t>(seen.size()), c.batch * c.heads_q * row_tiles) << c.Name();
  }
}

TEST(TileOrder, HeadsThatShareKAndVAreInOneSection) {
  for (const Case& c : kShapes) {
    if (!c.causal) continue;
    const TileGroup group = GroupOf(c);
    EXPECT_TRUE(group.section % (c.heads_q / c.heads_kv) == 0 || group.section == group.heads)
        << c.Name();
  }
}

TEST(TileOrder, UnderAMaskASectionsLastRowsComeFirst) {
  for (const Case& c : kShapes) {
    if (!c.causal) continue;
    const TileGroup group = GroupOf(c);
    const std::vector<TileWork> tiles = TilesOf(c);
    const size_t section = static_cast<size_t>(group.section) * group.row_tiles;
    for (size_t n = 1; n < tiles.size(); ++n) {
      if (n % section == 0) continue;
      EXPECT_LE(tiles[n].row_begin, tiles[n - 1].row_begin) << c.Name() << " tile " << n;
    }
  }
}

// The share of their time that blocks compute if each claims the next tile when it is done. A tile
// takes the time of its keys plus 128.
double TimeInUse(const Case& c) {
  constexpr int kBlocks = 132;
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int n = 0; n < kBlocks; ++n) ends.push(0);
  int64_t work = 0;
  int64_t last = 0;
  for (const TileWork& tile : TilesOf(c)) {
    const int64_t keys = std::min(c.length, tile.row_begin + int64_t{c.rows});
    const int64_t end = ends.top() + keys + 128;
    ends.pop();
    ends.push(end);
    work += keys + 128;
    last = std::max(last, end);
  }
  return static_cast<double>(work) / (static_cast<double>(last) * kBlocks);
}

TEST(TileOrder, UnderACausalMaskBlocksEndTogether) {
  const struct {
    int64_t heads, dim;
    int rows;
  } kernels[] = {{16, 128, 128}, {16, 128, 192}, {32, 64, 192}, {32, 64, 256},
                 {8, 256, 128},  {16, 96, 192},  {16, 192, 128}};
  for (const auto& kernel : kernels) {
    for (const int64_t length : {2048, 4096, 8192, 16384, 65536}) {
      const int64_t batch = std::max<int64_t>(1, 16384 / length);
      const Case c{batch, kernel.heads, kernel.heads, length, kernel.dim, kernel.rows};
      EXPECT_GE(TimeInUse(c), 0.98) << c.Name();
    }
  }
}

}  // namespace
}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// What a CPU kernel takes from the heap does not grow with its batch.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/flash.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// Scratch of a thread, tiles that are sorted together, partials of splits, and what TBB
// makes when it is first used.
constexpr int64_t kHeapBytesMax = int64_t{4} << 20;

// A million tiles of one row: their list was 50 times as large as the message that asks for them.
TEST(CpuMemoryTest, TilesAreNeverAllListed) {
  Problem p;
  p.batch = int64_t{1} << 18;
  p.heads_q = p.heads_kv = 4;
  p.len_q = 1;
  p.dim = p.dim_v = 1;
  p.scale = 1;
  ASSERT_TRUE(Check(p).ok());
  const auto rows = static_cast<size_t>(p.batch * p.heads_q);
  std::vector<float> q(rows, 1), o(rows, 5);
  Attention a;
  a.problem = p;
  a.q = {q.data(), p.heads_q, 1, 1};
  a.k = a.v = {q.data(), 0, 0, 1};
  a.o = {o.data(), p.heads_q, 1, 1};
  const Attention* batch[] = {&a};
  const HeapWatch watch;
  CpuFlash(batch);
  EXPECT_LE(watch.peak_bytes(), kHeapBytesMax);
  EXPECT_EQ(std::count(o.begin(), o.end(), 0.0f), static_cast<int64_t>(rows));
}

// Partials of all splits of all heads at once would be 35 MiB.
TEST(CpuMemoryTest, PartialAnswersAreNeverAllKept) {
  Attention a;
  Problem& p = a.problem;
  p.batch = 1;
  p.heads_kv = 256;
  p.heads_q = p.heads_kv * 16;
  p.len_q = 1;
  p.len_k = 32768;
  p.dim = p.dim_v = 1;
  p.scale = 1;
  ASSERT_TRUE(Check(p).ok());
  const auto rows = static_cast<size_t>(p.heads_q);
  std::vector<float> q(rows, 1), o(rows, 5);
  a.q = {q.data(), 0, 1, 1};
  a.k = a.v = {q.data(), 0, 0, 0};  // all keys are one
  a.o = {o.data(), 0, 1, 1};
  const Attention* batch[] = {&a};
  const HeapWatch watch;
  CpuFlash(batch);
  EXPECT_LE(watch.peak_bytes(), kHeapBytesMax);
  EXPECT_EQ(std::count(o.begin(), o.end(), 1.0f), static_cast<int64_t>(rows));
}

// More tiles than are listed at once, of several attentions: each is computed once and rightly.
TEST(CpuMemoryTest, EveryTileIsComputed) {
  constexpr int64_t kBatch = 5000;
  std::vector<float> v(kBatch * 2), o(kBatch * 2 * 3, -1);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  Attention a;
  a.problem.batch = kBatch;
  a.problem.heads_q = a.problem.heads_kv = 2;
  a.problem.len_q = 3;
  a.problem.len_k = 1;
  a.problem.dim = a.problem.dim_v = 1;
  a.problem.scale = 1;
  const std::vector<float> q(o.size(), 1);
  a.q = {q.data(), 6, 3, 1};
  a.k = {v.data(), 2, 1, 1};
  a.v = a.k;
  a.o = {o.data(), 6, 3, 1};
  std::vector<float> other(o.size(), -1);
  Attention b = a;
  b.o.data = other.data();
  Attention none = a;
  none.problem.batch = 0;
  const Attention* batch[] = {&none, &a, &none, &b, &none};
  CpuFlash(batch);
  for (size_t i = 0; i < o.size(); ++i) {
    ASSERT_EQ(o[i], v[i / 3]) << i;
    ASSERT_EQ(other[i], v[i / 3]) << i;
  }
}

}  // namespace
}  // namespace attend::test

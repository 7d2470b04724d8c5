// SPDX-License-Identifier: Apache-2.0
//
// The heap memory of a CPU kernel does not grow with its batch.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/flash.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

// A thread's scratch, tiles that are sorted together, partial answers of splits, and TBB's own
// allocations at its first use.
constexpr int64_t kHeapBytesMax = int64_t{4} << 20;

// A million tiles of one row: a list of all of them would be 50 times as large as the request.
TEST(CpuMemoryTest, TilesAreNotAllListedAtOnce) {
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

// Partial answers of all splits of all heads together would take 35 MiB.
TEST(CpuMemoryTest, PartialAnswersAreNotAllKeptAtOnce) {
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
  a.k = a.v = {q.data(), 0, 0, 0};  // all keys are the same one
  a.o = {o.data(), 0, 1, 1};
  const Attention* batch[] = {&a};
  const HeapWatch watch;
  CpuFlash(batch);
  EXPECT_LE(watch.peak_bytes(), kHeapBytesMax);
  EXPECT_EQ(std::count(o.begin(), o.end(), 1.0f), static_cast<int64_t>(rows));
}

// More tiles than are listed at once, of several attentions: each is computed exactly once.
TEST(CpuMemoryTest, EveryTileIsComputedOnce) {
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

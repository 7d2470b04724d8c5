// SPDX-License-Identifier: Apache-2.0
//
// Which bytes a lane moves for each part of a large attention, and which it leaves in place:
// arithmetic that needs no GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/byte_boxes.h"
#include "kernels/cuda/lane/cut_plan.h"
#include "kernels/cuda/lane/part_copies.h"
#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using cuda::BoxCopy;
using cuda::Extent;
using cuda::Extents;

// The tensors q, k, v, bias, o, lse as bits.
constexpr unsigned kInputs = 0xf;
constexpr unsigned kAll = 0x3f;

// The memory of those tensors.
SpanList SpansOf(const Attention& a, unsigned tensors) {
  const Problem& p = a.problem;
  const int64_t size = DTypeBytes(p.dtype);
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const int64_t batch = p.packed ? 1 : p.batch;
  SpanList spans;
  const auto add = [&](unsigned tensor, const void* data, int64_t run, const Extents& extents) {
    if ((tensors >> tensor & 1) == 0 || data == nullptr) return;
    spans.Add({const_cast<void*>(data), cuda::SpannedBytes(run, extents)});
  };
  const auto rows_of = [&](const auto& view, int64_t heads, int64_t length, int64_t bytes) {
    return Extents{Extent{length, view.stride_l * bytes}, Extent{heads, view.stride_h * bytes},
                   Extent{batch, view.stride_b * bytes}};
  };
  const auto rows = [&](const auto& view, int64_t heads, int64_t length) {
    return rows_of(view, heads, length, size);
  };
  add(0, a.q.data, p.dim * size, rows(a.q, p.heads_q, rows_q));
  add(1, a.k.data, p.dim * size, rows(a.k, p.heads_kv, rows_k));
  add(2, a.v.data, p.dim_v * size, rows(a.v, p.heads_kv, rows_k));
  const int64_t bias_size = DTypeBytes(a.bias.dtype);
  if (p.has_bias) {
    add(3, a.bias.data, p.len_k * bias_size,
        {Extent{p.len_q, a.bias.stride_q * bias_size},
         Extent{p.heads_q, a.bias.stride_h * bias_size},
         Extent{p.batch, a.bias.stride_b * bias_size}});
  }
  const int64_t o_size = DTypeBytes(p.o_dtype());
  add(4, a.o.data, p.dim_v * o_size, rows_of(a.o, p.heads_q, rows_q, o_size));
  if (p.return_lse) {
    add(5, a.lse, rows_q * 4,
        {Extent{1, 0}, Extent{p.heads_q, a.lse_stride_h * 4}, Extent{batch, a.lse_stride_b * 4}});
  }
  return spans;
}

// Does a lane's work with its parts on the host: all bytes but the copied ones are NaN; the answer
// must have the bits of the whole, and nothing else may be written. Of the tensors q, k, v, bias, o
// and lse those in `in_place`, a set of bits, are not copied.
void ExpectPartsAreTheWhole(const ProblemSpec& spec, int parts, unsigned in_place, uint64_t seed,
                            int* cut) {
  OwnedAttention owned = MakeAttention(spec, seed);
  CpuReference(owned.attention);
  const std::vector<std::byte> whole = owned.OutputBytes();
  owned.ResetOutput();
  const std::vector<AttentionSlice> slices =
      cuda::PlanParts(owned.attention, KernelId::kCudaFlashFp32, {.parts_min = parts});
  WorkItem item = owned.Item(Selection{});
  item.in_place = SpansOf(owned.attention, in_place);
  if (slices.empty()) return;
  ASSERT_TRUE(cuda::CanMoveInParts(item)) << Describe(spec);
  ++*cut;
  const Block input = MakeBlock(owned.input.bytes), output = MakeBlock(owned.output.bytes);
  std::memset(input.get(), 0xff, static_cast<size_t>(owned.input.bytes));
  std::memset(output.get(), 0xff, static_cast<size_t>(owned.output.bytes));
  const Result<Attention> device = cuda::Rebase(
      item, {{reinterpret_cast<char*>(input.get())}, {reinterpret_cast<char*>(output.get())}});
  ASSERT_TRUE(device.ok()) << device.status().ToString();
  const cuda::TwoViews views = {owned.attention, *device};
  cuda::PartCopies copies(views, item.in_place);
  int64_t bytes_in = 0;
  const auto copy = [&item](const std::vector<BoxCopy>& boxes) {
    int64_t bytes = 0;
    for (const BoxCopy& box : boxes) {
      bytes += box.width * box.rows;
      EXPECT_FALSE(item.in_place.Contains(box.from, 1) || item.in_place.Contains(box.to, 1));
      for (int64_t row = 0; row < box.rows; ++row) {
        std::memcpy(box.to + row * box.pitch, box.from + row * box.pitch,
                    static_cast<size_t>(box.width));
      }
    }
    return bytes;
  };
  bytes_in += copy(copies.Arrays());
  for (const AttentionSlice& slice : slices) {
    const Result<cuda::TwoViews> part = cuda::TakeSlice(views, slice);
    ASSERT_TRUE(part.ok()) << part.status().ToString();
    bytes_in += copy(copies.In(*part));
    CpuReference(part->device);
    copy(copies.Out(*part));
  }
  EXPECT_LE(bytes_in, owned.input.bytes) << "copied twice: " << Describe(spec);
  if ((in_place & kInputs) == kInputs) {
    EXPECT_LE(bytes_in, 4096) << Describe(spec);
  }
  EXPECT_TRUE(owned.GuardsIntact()) << Describe(spec);
  EXPECT_EQ(whole, owned.OutputBytes()) << Describe(spec) << " in " << parts << " seed " << seed;
}

TEST(PartCopies, CopyExactlyTheInputsOfEachPart) {
  const uint64_t seed = FreshSeed();
  int cut = 0;
  const int count = std::max(50, static_cast<int>(800 * TestScale()));
  for (int n = 0; n < count && !testing::Test::HasFailure(); ++n) {
    const uint64_t each = seed + static_cast<uint64_t>(n);
    // Half of them copied completely, the others in place in part or completely.
    const unsigned in_place = n % 2 == 0 ? 0 : n % 4 == 1 ? kAll : (each / 4) % (kAll + 1);
    ProblemSpec spec = RandomSpec(each, 1e5);
    if (n % 3 == 1) spec = WithDropout(std::move(spec), each);
    ExpectPartsAreTheWhole(spec, 2 + n % 6, in_place, each, &cut);
  }
  // A share of the problems, as under a sanitizer, need not meet every case.
  if (TestScale() < 1) return;
  EXPECT_GT(cut, count / 10);  // many have one sequence and one KV head
}

// The outputs that are poisoned in place before a kernel runs: every element of O and LSE, and
// nothing else.
TEST(OutputsInPlace, ContainExactlyTheBytesThatTheKernelWrites) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < 100; ++n) {
    const ProblemSpec spec = RandomSpec(seed + n, 1e5);
    OwnedAttention owned = MakeAttention(spec, seed + n);
    const Attention& a = owned.attention;
    WorkItem item = owned.Item(Selection{});
    EXPECT_TRUE(cuda::OutputsInPlace(item)->empty());
    item.in_place = {owned.output};
    CpuReference(a);
    const Result<std::vector<cuda::ByteRuns>> outputs = cuda::OutputsInPlace(item);
    ASSERT_TRUE(outputs.ok()) << outputs.status().ToString() << " seed " << seed + n;
    for (const cuda::ByteRuns& runs : *outputs) {
      for (int64_t row = 0; row < runs.rows; ++row) {
        std::memset(runs.data + row * runs.pitch, cuda::kPoison, static_cast<size_t>(runs.width));
      }
    }
    ASSERT_TRUE(owned.GuardsIntact()) << Describe(spec) << " seed " << seed + n;
    for (int64_t b = 0; b < a.problem.batch; ++b) {
      const Sequence s = SequenceOf(a, b);
      for (int64_t h = 0; h < a.problem.heads_q; ++h) {
        for (int64_t i = 0; i < s.q_rows; ++i) {
          for (int64_t d = 0; d < a.problem.dim_v; ++d) {
            ASSERT_TRUE(std::isnan(Get(a, owned.O(b, h, i, d)))) << Describe(spec);
          }
          if (!a.problem.return_lse) continue;
          ASSERT_TRUE(std::isnan(a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i]))
              << Describe(spec);
        }
      }
    }
  }
}

TEST(OutputsInPlace, RefusesMissingOrOverlappingBytes) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 30, 40, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  item.in_place = {{item.attention.o.data, 2 * 30 * 8 * 4 - 1}};
  EXPECT_EQ(cuda::OutputsInPlace(item).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(cuda::CanMoveInParts(item));
  item.in_place = {{item.attention.o.data, 2 * 30 * 8 * 4}};
  EXPECT_TRUE(cuda::CanMoveInParts(item));
  item.attention.o.stride_l -= 1;
  EXPECT_EQ(cuda::OutputsInPlace(item).status().code(), Code::kInvalidArgument);
}

TEST(PartCopies, KeysOfSeveralRowPartsAreCopiedOnce) {
  const uint64_t seed = FreshSeed();
  int cut = 0;
  for (const auto layout : {Layout::kBHLD, Layout::kBLHD, Layout::kStrided}) {
    for (const int64_t right : {int64_t{-1}, int64_t{0}}) {
      ProblemSpec spec = MakeSpec(1, 2, 1, 2000, right == 0 ? 2100 : 40, 3, 4);
      spec.layout = layout;
      spec.problem.mask.right = right;
      spec.problem.mask.left = right == 0 ? 30 : -1;
      spec.problem.has_bias = true;
      spec.bias_per_query = right == 0;
      spec.problem.has_sinks = true;
      for (const unsigned in_place : {0u, kInputs, kAll}) {
        ExpectPartsAreTheWhole(spec, 3, in_place, seed, &cut);
      }
    }
  }
  EXPECT_EQ(cut, 18);
}

// Where one tensor is seen as two: the copy for Q is not used for K.
TEST(PartCopies, TensorsMayShareMemory) {
  ProblemSpec spec = MakeSpec(2, 4, 4, 9, 9, 8, 8);
  OwnedAttention owned = MakeAttention(spec, FreshSeed());
  owned.attention.k = owned.attention.q;
  const WorkItem item = owned.Item(Selection{});
  ASSERT_TRUE(cuda::CanMoveInParts(item));
  cuda::PartCopies copies({owned.attention, owned.attention}, {});
  const Result<cuda::TwoViews> part =
      cuda::TakeSlice({owned.attention, owned.attention}, {0, 1, 1, 2, 0, 9});
  ASSERT_TRUE(part.ok());
  EXPECT_EQ(copies.In(*part).size(), 3u);
}

TEST(CanMoveInParts, RefusesTensorsOutsideTheSpansOrOverlapping) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 2, 1, 30, 40, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  EXPECT_TRUE(cuda::CanMoveInParts(item));
  item.inputs = {{owned.input.data, owned.input.bytes / 2}};
  EXPECT_FALSE(cuda::CanMoveInParts(item));
  item = owned.Item(Selection{});
  item.attention.o.stride_h = 0;
  EXPECT_FALSE(cuda::CanMoveInParts(item));
  item = owned.Item(Selection{});
  item.attention.q.stride_l -= 1;
  EXPECT_FALSE(cuda::CanMoveInParts(item));

  ProblemSpec packed = MakeSpec(2, 1, 1, 1, 1, 8, 8);
  packed.problem.packed = true;
  packed.q_lengths = packed.kv_lengths = {3, 4};
  owned = MakeAttention(packed, FreshSeed());
  EXPECT_TRUE(cuda::CanMoveInParts(owned.Item(Selection{})));
  const_cast<int64_t*>(owned.attention.q_offsets)[1] = 9;
  EXPECT_FALSE(cuda::CanMoveInParts(owned.Item(Selection{})));
}

}  // namespace
}  // namespace attend::test

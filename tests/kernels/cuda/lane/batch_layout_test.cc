// SPDX-License-Identifier: Apache-2.0
//
// The parts of the CUDA backend that need no GPU: layout, rebasing, error classes, and what is said
// on a machine that has none.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {
namespace {

using cuda::BatchLayout;
using cuda::kLayoutAlignment;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

void* Address(uintptr_t value) { return reinterpret_cast<void*>(value); }

WorkItem ItemOf(uintptr_t in, int64_t in_bytes, uintptr_t out, int64_t out_bytes,
                int64_t workspace) {
  WorkItem item;
  item.inputs.Add({Address(in), in_bytes});
  item.outputs.Add({Address(out), out_bytes});
  item.selection.workspace_bytes = workspace;
  return item;
}

TEST(LayOut, KeepsResiduesAndDoesNotOverlap) {
  const std::vector<WorkItem> items = {ItemOf(0x10000, 1000, 0x20010, 77, 500),
                                       ItemOf(0x300f3, 1, 0x40000, 0, 4000),
                                       ItemOf(0x50040, 0, 0x60001, 4096, 0)};
  const Result<BatchLayout> layout = cuda::LayOut(items, kNoLimit);
  ASSERT_TRUE(layout.ok()) << layout.status().ToString();
  ASSERT_EQ(layout->items.size(), items.size());
  EXPECT_EQ(layout->workspace, 0) << "its head stays zero from batch to batch";
  EXPECT_GE(layout->workspace_bytes, cuda::kTileQueueBytes);
  int64_t end = layout->workspace_bytes;
  const auto check = [&](const SpanList& spans, const auto& places) {
    for (int i = 0; i < spans.size(); ++i) {
      EXPECT_EQ(places[i] % kLayoutAlignment,
                static_cast<int64_t>(reinterpret_cast<uintptr_t>(spans[i].data) %
                                     static_cast<uintptr_t>(kLayoutAlignment)));
      EXPECT_GE(places[i], end);
      end = places[i] + spans[i].bytes;
    }
  };
  for (size_t n = 0; n < items.size(); ++n) check(items[n].inputs, layout->items[n].inputs);
  for (size_t n = 0; n < items.size(); ++n) check(items[n].outputs, layout->items[n].outputs);
  EXPECT_EQ(layout->bytes, end);
}

TEST(LayOut, EmptyBatchNeedsNothing) {
  const Result<BatchLayout> layout = cuda::LayOut({}, 0);
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->bytes, 0);
}

TEST(LayOut, RefusesBatchesAboveTheLimit) {
  const std::vector<WorkItem> large = {ItemOf(0, 8, 0, 8, 1001)};
  const Result<BatchLayout> limited = cuda::LayOut(large, 1000);
  ASSERT_FALSE(limited.ok());
  EXPECT_EQ(limited.status().code(), Code::kResourceExhausted);
  EXPECT_NE(limited.status().message().find("1001"), std::string::npos);
  EXPECT_NE(limited.status().message().find("1000"), std::string::npos);

  const std::vector<WorkItem> overflow = {ItemOf(0, kNoLimit - 10, 0, kNoLimit - 10, 0)};
  EXPECT_EQ(cuda::LayOut(overflow, kNoLimit).status().code(), Code::kInvalidArgument);
  const std::vector<WorkItem> negative = {ItemOf(0, -1, 0, 8, 0)};
  EXPECT_EQ(cuda::LayOut(negative, kNoLimit).status().code(), Code::kInvalidArgument);
}

TEST(Rebase, MovesEveryPointerByItsSpan) {
  const uint64_t seed = FreshSeed();
  for (uint64_t n = 0; n < 200; ++n) {
    const ProblemSpec spec = RandomSpec(seed + n);
    OwnedAttention owned = MakeAttention(spec, seed + n);
    const WorkItem item = owned.Item(Selection{});
    // Onto copies of the blocks: then the moved attention must hold the same data.
    Block input_block = MakeBlock(item.inputs[0].bytes);
    Block output_block = MakeBlock(item.outputs[0].bytes);
    char* const input = reinterpret_cast<char*>(input_block.get());
    char* const output = reinterpret_cast<char*>(output_block.get());
    const Result<Attention> moved = cuda::Rebase(item, {{input}, {output}});
    ASSERT_TRUE(moved.ok()) << moved.status().ToString() << " seed " << seed + n;
    const auto same = [](const void* from, const void* base, const void* to,
                         const void* moved_base) {
      if (from == nullptr) return to == nullptr;
      return static_cast<const char*>(from) - static_cast<const char*>(base) ==
             static_cast<const char*>(to) - static_cast<const char*>(moved_base);
    };
    const Attention& a = owned.attention;
    const Attention& b = *moved;
    const std::pair<const void*, const void*> inputs[] = {{a.q.data, b.q.data},
                                                          {a.k.data, b.k.data},
                                                          {a.v.data, b.v.data},
                                                          {a.bias.data, b.bias.data},
                                                          {a.alibi_slopes, b.alibi_slopes},
                                                          {a.sinks, b.sinks},
                                                          {a.q_lengths, b.q_lengths},
                                                          {a.kv_lengths, b.kv_lengths},
                                                          {a.q_offsets, b.q_offsets},
                                                          {a.kv_offsets, b.kv_offsets}};
    for (const auto& [from, to] : inputs) {
      EXPECT_TRUE(same(from, item.inputs[0].data, to, input)) << Describe(spec);
    }
    EXPECT_TRUE(same(a.o.data, item.outputs[0].data, b.o.data, output));
    EXPECT_TRUE(same(a.lse, item.outputs[0].data, b.lse, output));
  }
}

TEST(Rebase, NamesAPointerOutside) {
  OwnedAttention owned = MakeAttention(MakeSpec(1, 1, 1, 4, 4, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  item.attention.k.data = static_cast<const char*>(owned.input.data) + owned.input.bytes + 1;
  const Status status = cuda::Rebase(item, {}).status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("k "), std::string::npos) << status.message();

  item = owned.Item(Selection{});
  item.attention.lse = static_cast<float*>(owned.input.data);
  EXPECT_NE(cuda::Rebase(item, {}).status().message().find("lse"), std::string::npos);
}

// Each tensor in separate memory, with the places in another order than the spans.
TEST(Rebase, TakesEachPointerFromItsSpan) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<char*>(address); };
  WorkItem item;
  item.attention.q.data = at(0x1000);
  item.attention.k.data = at(0x2000);
  item.attention.v.data = at(0x2100);     // where k's span ends and its own begins
  item.attention.bias.data = at(0x2200);  // at the end of v's: nothing is read there
  item.attention.o.data = at(0x4000);
  item.attention.lse = reinterpret_cast<float*>(at(0x5010));
  item.inputs = {{at(0x1000), 0x80}, {at(0x2000), 0x100}, {at(0x2100), 0x100}};
  item.outputs = {{at(0x4000), 0x40}, {at(0x5000), 0x40}};
  cuda::ItemLayout layout;
  layout.inputs = {0x300, 0x200, 0x100};
  layout.outputs = {0x500, 0x400};
  const Result<Attention> moved = cuda::Rebase(item, cuda::PlaceIn(at(0x100000), item, layout));
  ASSERT_TRUE(moved.ok()) << moved.status().ToString();
  EXPECT_EQ(moved->q.data, at(0x100300));
  EXPECT_EQ(moved->k.data, at(0x100200));
  EXPECT_EQ(moved->v.data, at(0x100100));
  EXPECT_EQ(moved->bias.data, at(0x100200));
  EXPECT_EQ(moved->o.data, at(0x100500));
  EXPECT_EQ(static_cast<void*>(moved->lse), at(0x100410));
}

// Tensors in memory of the device stay where they are; what is moved beside them moves as ever.
TEST(Rebase, DoesNotMoveTensorsInPlace) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<char*>(address); };
  WorkItem item;
  item.attention.q.data = at(0x1000);
  item.attention.k.data = at(0x900000);
  item.attention.v.data = at(0x900100);
  item.attention.bias.data = at(0x900200);  // at the end: nothing is read there
  item.attention.sinks = reinterpret_cast<float*>(at(0x1080));
  item.attention.q_lengths = reinterpret_cast<int64_t*>(at(0x10c0));
  item.attention.o.data = at(0xa00040);
  item.attention.lse = reinterpret_cast<float*>(at(0x5000));
  item.inputs = {{at(0x1000), 0x100}};
  item.outputs = {{at(0x5000), 0x40}};
  item.in_place = {{at(0x900000), 0x200}, {at(0xa00000), 0x80}};
  const std::vector<WorkItem> items = {item};
  const Result<BatchLayout> layout = cuda::LayOut(items, kNoLimit);
  ASSERT_TRUE(layout.ok()) << layout.status().ToString();
  EXPECT_LE(layout->bytes, layout->workspace_bytes + 2 * kLayoutAlignment + 0x140)
      << "no room is taken for what is in place";
  ASSERT_TRUE(cuda::CheckInPlace(item).ok());
  const cuda::ItemPlace place = cuda::PlaceIn(at(0x100000), item, layout->items[0]);
  const Result<Attention> moved = cuda::Rebase(item, place);
  ASSERT_TRUE(moved.ok()) << moved.status().ToString();
  EXPECT_EQ(moved->q.data, place.inputs[0]);
  EXPECT_EQ(moved->k.data, at(0x900000));
  EXPECT_EQ(moved->v.data, at(0x900100));
  EXPECT_EQ(moved->bias.data, at(0x900200));
  EXPECT_EQ(static_cast<const void*>(moved->sinks), place.inputs[0] + 0x80);
  EXPECT_EQ(static_cast<const void*>(moved->q_lengths), place.inputs[0] + 0xc0);
  EXPECT_EQ(moved->o.data, at(0xa00040));
  EXPECT_EQ(static_cast<void*>(moved->lse), place.outputs[0]);

  item.attention.v.data = at(0x900201);
  const Status outside = cuda::Rebase(item, place).status();
  EXPECT_EQ(outside.code(), Code::kInvalidArgument);
  EXPECT_NE(outside.message().find("v "), std::string::npos) << outside.message();
}

TEST(CheckInPlace, RefusesTensorsOfTheHostAndUnaddressableOnes) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<char*>(address); };
  OwnedAttention owned =
      MakeAttention(MakeSpec(1, 2, 2, 16, 16, 64, 64, DType::kFloat16), FreshSeed());
  WorkItem item = owned.Item({KernelId::kCudaFlashSm90, {}, 0});
  item.in_place = {{at(0x900000), 0x10000}};
  EXPECT_TRUE(cuda::CheckInPlace(item).ok());

  item.attention.kv_lengths = reinterpret_cast<int64_t*>(at(0x900000));
  const Status lengths = cuda::CheckInPlace(item);
  EXPECT_EQ(lengths.code(), Code::kInvalidArgument);
  EXPECT_NE(lengths.message().find("kv_lengths"), std::string::npos) << lengths.message();
  item.attention.kv_lengths = nullptr;

  item.attention.k.data = at(0x900002);
  const Status unaligned = cuda::CheckInPlace(item);
  EXPECT_EQ(unaligned.code(), Code::kInvalidArgument);
  EXPECT_NE(unaligned.message().find("cuda_flash_sm90"), std::string::npos) << unaligned.message();
  item.selection.workspace_bytes = cuda::TraitsOf(item.attention).repack_bytes;
  EXPECT_TRUE(cuda::CheckInPlace(item).ok()) << "the copy that it needs was planned for";
  --item.selection.workspace_bytes;
  EXPECT_FALSE(cuda::CheckInPlace(item).ok());
  item.selection = {KernelId::kCudaFlashSm80, {}, 0};
  EXPECT_TRUE(cuda::CheckInPlace(item).ok()) << "which takes any address";

  item.in_place = {{at(0x900000), -1}};
  EXPECT_EQ(cuda::CheckInPlace(item).code(), Code::kInvalidArgument);
}

TEST(OutputIsDense, CountsOnlyOutputsThatAreMoved) {
  OwnedAttention owned = MakeAttention(MakeSpec(2, 3, 1, 5, 7, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  item.in_place = {{item.attention.o.data, 2 * 3 * 5 * 8 * 4}};
  item.outputs = {{item.attention.lse, 2 * 3 * 5 * 4}};
  EXPECT_TRUE(cuda::OutputIsDense(item));
  item.outputs = {{item.attention.lse, 2 * 3 * 5 * 4 + 4}};
  EXPECT_FALSE(cuda::OutputIsDense(item));
  item.in_place.Add({item.attention.lse, 2 * 3 * 5 * 4});
  item.outputs = {};
  EXPECT_TRUE(cuda::OutputIsDense(item)) << "there is nothing to bring back";
}

TEST(OutputIsDense, IsFalseForOutputsWithGaps) {
  OwnedAttention owned = MakeAttention(MakeSpec(2, 3, 1, 5, 7, 8, 8), FreshSeed());
  WorkItem item = owned.Item(Selection{});
  EXPECT_FALSE(cuda::OutputIsDense(item));  // the test's block has guards
  item.outputs = {{owned.output.data, 2 * 3 * 5 * 8 * 4}, {owned.output.data, 2 * 3 * 5 * 4}};
  EXPECT_TRUE(cuda::OutputIsDense(item));
}

TEST(CudaStatus, CudaErrorsHaveTheirCodes) {
  EXPECT_TRUE(cuda::ToStatus(cudaSuccess, "x").ok());
  EXPECT_EQ(cuda::ToStatus(cudaErrorMemoryAllocation, "x").code(), Code::kResourceExhausted);
  const Status status = cuda::ToStatus(cudaErrorIllegalAddress, "copy in");
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("cudaErrorIllegalAddress ("), std::string::npos);
  EXPECT_NE(status.message().find("copy in"), std::string::npos);
  EXPECT_TRUE(cuda::IsSticky(cudaErrorIllegalAddress));
  EXPECT_TRUE(cuda::IsSticky(cudaErrorECCUncorrectable));
  EXPECT_FALSE(cuda::IsSticky(cudaErrorMemoryAllocation));
  EXPECT_FALSE(cuda::IsSticky(cudaErrorInvalidConfiguration));
}

// As all GPUs since Ampere have; the kernels' own shared memory counts.
TEST(FlashVariants, OneRunsWithinNinetyNineKibibytes) {
  const auto fits = [](const cuda::FlashVariant& variant) {
    EXPECT_GT(variant.block_bytes, variant.shared_bytes) << variant.name;
    return variant.block_bytes <= 99 * 1024;
  };
  void (*const options[])(Problem*) = {
      [](Problem*) {}, [](Problem* p) { p->softcap = 1; }, [](Problem* p) { p->dropout = 1; },
      [](Problem* p) { p->page_rows = 64; }, [](Problem* p) { p->len_q = 100; }};
  for (int dim = 1; dim <= 256; ++dim) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const auto& option : options) {
        Problem p = MakeSpec(1, 1, 1, 1, 1, dim, 1, dtype).problem;
        option(&p);
        for (const KernelId kernel :
             {KernelId::kCudaFlashFp32, KernelId::kCudaFlashSm80, KernelId::kCudaDecodeSm80}) {
          const auto variants = cuda::VariantsFor(kernel, p);
          const bool taken = kernel == KernelId::kCudaFlashFp32 || dtype != DType::kFloat32;
          EXPECT_EQ(std::any_of(variants.begin(), variants.end(), fits), taken)
              << KernelName(kernel) << " " << Describe(p);
        }
      }
    }
  }
}

TEST(FlashVariants, FewTilesAreHalved) {
  const auto rows = [](int64_t batch, int64_t heads, int64_t length) {
    const Problem p =
        MakeSpec(batch, heads, heads, length, length, 64, 64, DType::kFloat16).problem;
    return cuda::VariantsFor(KernelId::kCudaFlashSm80, p).front().rows;
  };
  EXPECT_EQ(rows(4, 8, 256), 64);
  EXPECT_EQ(rows(4, 8, 512), 64);
  EXPECT_EQ(rows(1, 132, 128), 64);
  EXPECT_EQ(rows(1, 133, 128), 128);
  EXPECT_EQ(rows(4, 8, 1024), 128);
}

TEST(FlashVariants, NamesAreUnique) {
  for (const bool plain : {true, false}) {
    for (const int dim : {32, 64, 96, 128, 192, 256}) {
      Problem p = MakeSpec(1, 1, 1, 1, 1, dim, dim, DType::kFloat16).problem;
      if (!plain) p.softcap = 1;
      std::set<std::string_view> names;
      for (const auto& variant : cuda::VariantsFor(KernelId::kCudaFlashSm80, p)) {
        EXPECT_TRUE(names.insert(variant.name).second) << dim << " " << variant.name;
        EXPECT_LE(variant.block_bytes, 227 * 1024) << dim << " " << variant.name;
      }
      EXPECT_FALSE(names.empty()) << dim;
    }
  }
}

TEST(FlashVariants, HopperHasOneForEveryHeadDim) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (int dim = 8; dim <= 256; dim += 8) {
      for (const int dim_v : {8, dim, 256}) {
        for (const int64_t len_k : {1, 1 << 20}) {
          const Problem p = MakeSpec(1, 1, 1, 1, len_k, dim, dim_v, dtype).problem;
          const auto variants = cuda::VariantsFor(KernelId::kCudaFlashSm90, p);
          ASSERT_FALSE(variants.empty()) << dim << " " << dim_v;
          for (const cuda::FlashVariant& variant : variants) {
            EXPECT_LE(variant.block_bytes, 227 * 1024) << variant.name;
            EXPECT_EQ(variant.boxes.q.rows, variant.rows) << variant.name;
          }
        }
      }
    }
  }
  Problem bias = MakeSpec(1, 1, 1, 1, 1, 64, 64, DType::kFloat16).problem;
  bias.has_bias = true;
  EXPECT_TRUE(cuda::VariantsFor(KernelId::kCudaFlashSm90, bias).empty());
}

TEST(Devices, WithoutADeviceTheReasonIsGiven) {
  std::string why;
  const int count = CudaDeviceCount(&why);
  if (count == 0) {
    EXPECT_FALSE(why.empty());
  }
  EXPECT_NE(CudaBuildVersion(), "none");
  const auto backend = MakeCudaBackend(count, BackendOptions{});
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.status().code(), Code::kNotFound);
  EXPECT_NE(backend.status().message().find("cuda:" + std::to_string(count)), std::string::npos);
}

}  // namespace
}  // namespace attend::test

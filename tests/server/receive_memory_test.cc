// SPDX-License-Identifier: Apache-2.0
//
// The heap as page-locked memory. In a process whose allocator is tuned as the server's is; under
// sanitizers, whose malloc is another, there is none to be had, and that is all that is tested.

#include "server/receive_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "proto/process_settings.h"

namespace attend {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kHeapGrows = false;
#else
constexpr bool kHeapGrows = true;
#endif

class NotingAllocator final : public HostAllocator {
 public:
  Result<void*> Allocate(int64_t) override { return Unimplemented("not asked for"); }
  void Free(void*, int64_t) override {}
  Status Register(void* data, int64_t bytes) override {
    if (!refusal.ok()) return refusal;
    registered[data] = bytes;
    return Status();
  }
  void Unregister(void* data, int64_t bytes) override {
    EXPECT_EQ(registered[data], bytes);
    registered.erase(data);
  }
  std::map<void*, int64_t> registered;
  Status refusal;
};

TEST(ReceiveMemory, HoldsWhatMallocGivesToAllThreads) {
  TuneAllocator();
  constexpr int64_t kBytes = int64_t{256} << 20;
  NotingAllocator allocator;
  std::string why;
  std::unique_ptr<ReceiveMemory> memory = ReceiveMemory::Make(allocator, kBytes, &why);
  if (!kHeapGrows) {
    EXPECT_EQ(memory, nullptr);
    EXPECT_NE(why, "");
    return;
  }
  ASSERT_NE(memory, nullptr) << why;
  EXPECT_GE(memory->bytes(), kBytes - 8192);
  ASSERT_EQ(allocator.registered.size(), 1u);
  EXPECT_EQ(allocator.registered.begin()->second, memory->bytes());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(allocator.registered.begin()->first) % 4096, 0u);

  const auto take_from_it = [&] {
    std::vector<void*> blocks;
    int inside = 0;
    for (int i = 0; i < 1000; ++i) {
      blocks.push_back(std::malloc(65600));
      inside += memory->Contains(blocks.back(), 65600) ? 1 : 0;
    }
    for (void* block : blocks) std::free(block);
    EXPECT_GE(inside, 990) << "but for what fits into holes from before";
  };
  for (int round = 0; round < 3; ++round) {  // what was freed comes again
    take_from_it();
    std::thread(take_from_it).join();
  }
  memory.reset();
  EXPECT_TRUE(allocator.registered.empty());
}

// A GPU would go on reading pages that the system has taken back.
TEST(ReceiveMemory, IsNeverGivenBack) {
  if (!kHeapGrows) GTEST_SKIP() << "another malloc";
  TuneAllocator();
  NotingAllocator allocator;
  std::string why;
  const auto memory = ReceiveMemory::Make(allocator, int64_t{64} << 20, &why);
  ASSERT_NE(memory, nullptr) << why;
  const char* const end =
      static_cast<const char*>(allocator.registered.begin()->first) + memory->bytes();
  std::vector<void*> blocks;
  for (int64_t taken = 0; taken < int64_t{9} << 28; taken += 65600) {  // more than 2^31 bytes
    blocks.push_back(std::malloc(65600));
  }
  for (void* block : blocks) std::free(block);
  EXPECT_GE(static_cast<const char*>(sbrk(0)), end);
}

TEST(ReceiveMemory, ARefusalIsTold) {
  TuneAllocator();
  NotingAllocator allocator;
  allocator.refusal = ResourceExhausted("too much is locked");
  std::string why;
  EXPECT_EQ(ReceiveMemory::Make(allocator, 1 << 20, &why), nullptr);
  if (kHeapGrows) {
    EXPECT_EQ(why, "too much is locked");
  }
}

TEST(ReceiveMemory, ContainsItsRangeAndNothingElse) {
  char data[64];
  const ReceiveMemory memory(data + 8, 48);
  EXPECT_TRUE(memory.Contains(data + 8, 48));
  EXPECT_TRUE(memory.Contains(data + 56, 0));
  EXPECT_FALSE(memory.Contains(data + 7, 1));
  EXPECT_FALSE(memory.Contains(data + 8, 49));
  EXPECT_FALSE(memory.Contains(data + 57, 0));
  EXPECT_FALSE(memory.Contains(nullptr, 1));
}

}  // namespace
}  // namespace attend

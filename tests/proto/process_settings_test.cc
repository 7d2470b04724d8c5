// SPDX-License-Identifier: Apache-2.0

#include "proto/process/process_settings.h"

#include <absl/synchronization/mutex.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <thread>

#include "proto/process/receive_blocks.h"

namespace attend {
namespace {

TEST(ProcessSettingsTest, GlibcAcceptsTheTuning) {
  if (!kMallocHasBlocks) GTEST_SKIP() << "another malloc";
  const TunedAllocator made = TuneAllocatorAndBlocks();
  EXPECT_TRUE(made.tuned);
  EXPECT_EQ(made.blocks.bytes, kReceiveBlocksBytes);
  // By default a freed block of this size would be unmapped; with the tuning the next one reuses
  // it.
  void* first = malloc(size_t{8} << 20);
  const uintptr_t address = reinterpret_cast<uintptr_t>(first);
  EXPECT_EQ(mallinfo2().hblks, 0u) << "large blocks are still mapped one by one";
  free(first);
  void* second = malloc(size_t{8} << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(second), address);
  free(second);
}

// Like those of clients' answers. In any arena but the first they would be mapped one by one.
TEST(ProcessSettingsTest, OneArenaKeepsLargePiecesOfAnyThread) {
  if (!kMallocHasBlocks) GTEST_SKIP() << "another malloc";
  TuneAllocatorAndBlocks();
  std::thread([] {
    void* const data = malloc(size_t{96} << 20);
    EXPECT_EQ(mallinfo2().hblks, 0u) << "it is mapped by itself";
    free(data);
  }).join();
}

// Two locks taken in both orders: deadlock detection would abort the process.
TEST(ProcessSettingsTest, AbseilsDeadlockDetectionIsOff) {
  SkipDeadlockSearch();
  absl::Mutex first;
  absl::Mutex second;
  {
    const absl::MutexLock outer(&first);
    const absl::MutexLock inner(&second);
  }
  const absl::MutexLock outer(&second);
  const bool free = first.TryLock();
  if (free) first.Unlock();
  EXPECT_TRUE(free);
  const absl::MutexLock inner(&first);
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/transport/http2_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

namespace attend {
namespace {

class Http2MemoryTest : public testing::Test {
 protected:
  void* Take(size_t bytes) {
    void* const data = functions_.malloc(bytes, functions_.mem_user_data);
    if (data != nullptr) memset(data, 0xab, bytes);
    return data;
  }
  void* TakeZeros(size_t count, size_t bytes) {
    return functions_.calloc(count, bytes, functions_.mem_user_data);
  }
  void* Resize(void* data, size_t bytes) {
    return functions_.realloc(data, bytes, functions_.mem_user_data);
  }
  void Give(void* data) { functions_.free(data, functions_.mem_user_data); }

  Http2Memory memory_;
  nghttp2_mem functions_ = memory_.Functions();
};

TEST_F(Http2MemoryTest, FreedBlocksAreReused) {
  for (const size_t bytes : {0, 1, 64, 65, 512}) {
    void* const first = Take(bytes);
    ASSERT_NE(first, nullptr);
    Give(first);
    EXPECT_EQ(Take(bytes), first) << bytes;
    Give(first);
  }
  Give(nullptr);
}

TEST_F(Http2MemoryTest, BlocksInUseDoNotOverlap) {
  std::set<void*> all;
  for (int round = 0; round < 2; ++round) {
    std::vector<void*> taken;
    for (int i = 0; i < 1000; ++i) taken.push_back(Take(static_cast<size_t>(i)));
    all = {taken.begin(), taken.end()};
    EXPECT_EQ(all.size(), taken.size());
    for (void* const each : taken) Give(each);  // most of which exceeds what is cached
  }
}

TEST_F(Http2MemoryTest, ReallocKeepsTheBytesAndCallocZeroes) {
  auto* data = static_cast<uint8_t*>(Resize(nullptr, 10));
  for (size_t bytes = 10; bytes <= 2000; bytes += 10) {
    data = static_cast<uint8_t*>(Resize(data, bytes));
    ASSERT_NE(data, nullptr);
    for (size_t i = 0; i + 10 < bytes; ++i) ASSERT_EQ(data[i], static_cast<uint8_t>(i / 10));
    memset(data + bytes - 10, static_cast<int>((bytes - 10) / 10), 10);
  }
  Give(data);
  Give(Take(300));
  auto* const zeros = static_cast<uint8_t*>(TakeZeros(3, 100));
  for (size_t i = 0; i < 300; ++i) ASSERT_EQ(zeros[i], 0);
  Give(zeros);
  EXPECT_EQ(TakeZeros(SIZE_MAX / 2, 3), nullptr);
}

}  // namespace
}  // namespace attend

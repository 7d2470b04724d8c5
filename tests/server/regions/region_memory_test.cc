// SPDX-License-Identifier: Apache-2.0

#include "server/regions/region_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace attend {
namespace {

int64_t PagesOf(int file) {
  struct stat about {};
  EXPECT_EQ(fstat(file, &about), 0);
  return int64_t{about.st_blocks} * 512 / sysconf(_SC_PAGESIZE);
}

TEST(MemfdMemoryTest, TheFileIsSealedAndItsBytesAreShared) {
  class NoLock final : public HostAllocator {
   public:
    Result<void*> Allocate(int64_t) override { return ResourceExhausted("not for this"); }
    void Free(void*, int64_t) override {}
    Status Register(void*, int64_t bytes) override {
      locked += bytes;
      return refusal;
    }
    void Unregister(void*, int64_t bytes) override { locked -= bytes; }
    int64_t locked = 0;
    Status refusal;
  };
  NoLock allocator;
  MemfdMemory memory(allocator);
  const int64_t bytes = 4 * memory.page_bytes();
  Result<RegionMapping> mapping = memory.Map(bytes);
  ASSERT_TRUE(mapping.ok()) << mapping.status().ToString();
  EXPECT_EQ(allocator.locked, bytes);
  const int file = mapping->file.get();
  EXPECT_NE(ftruncate(file, 0), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(ftruncate(file, 2 * bytes), 0);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), 0) << "the server could not write any more";
  char* const server = static_cast<char*>(mapping->data);
  EXPECT_EQ(server[bytes - 1], 0);
  char* const client = static_cast<char*>(
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  ASSERT_NE(client, MAP_FAILED);
  client[5] = 'a';
  EXPECT_EQ(server[5], 'a');
  server[bytes - 1] = 'b';
  EXPECT_EQ(client[bytes - 1], 'b');
  // A hole reads as zeros; it does not fault.
  EXPECT_EQ(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes), 0);
  EXPECT_EQ(server[5], 0);
  client[0] = 'c';
  memory.Unlock(mapping->data, bytes);
  EXPECT_EQ(allocator.locked, 0);
  memory.Unmap(mapping->data, bytes, Pages::kFreed);
  EXPECT_EQ(PagesOf(file), 0) << "a client that keeps the memory keeps none of its pages";
  EXPECT_EQ(client[0], 0);
  munmap(client, static_cast<size_t>(bytes));

  const Result<RegionMapping> kept = memory.Map(bytes);
  ASSERT_TRUE(kept.ok());
  static_cast<char*>(kept->data)[0] = 'd';
  memory.Unlock(kept->data, bytes);
  memory.Unmap(kept->data, bytes, Pages::kKept);
  EXPECT_EQ(allocator.locked, 0);
  char byte = 0;
  EXPECT_EQ(pread(kept->file.get(), &byte, 1, 0), 1);
  EXPECT_EQ(byte, 'd');

  allocator.refusal = ResourceExhausted("no page may be locked");
  const Result<RegionMapping> refused = memory.Map(bytes);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().message(), "no page may be locked");
  const Result<RegionMapping> huge = memory.Map(int64_t{1} << 60);
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.status().code(), Code::kResourceExhausted) << huge.status().ToString();
  EXPECT_NE(huge.status().message().find("the machine has"), std::string::npos);
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/transport/block_pool.h"

#include <sys/mman.h>

#include <algorithm>

namespace attend {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

}  // namespace

BlockPool::BlockPool(int64_t bytes) {
  if (bytes <= 0) return;
  const size_t whole =
      (static_cast<size_t>(bytes) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* const mapped = mmap(nullptr, whole + kHugePageBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return;
  mapped_ = mapped;
  mapped_bytes_ = whole + kHugePageBytes;
  const size_t past = reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes;
  begin_ = static_cast<char*>(mapped) + (kHugePageBytes - past) % kHugePageBytes;
  // Huge pages are faulted in and page-locked faster. That is only advice.
  (void)madvise(begin_, whole, MADV_HUGEPAGE);
  count_ = whole / kBlockBytes;
  links_ = std::make_unique<std::atomic<uint32_t>[]>(count_);
  free_.Make(links_.get(), static_cast<uint32_t>(count_));
}

BlockPool::~BlockPool() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

BlockPool::Block BlockPool::Take() {
  const uint32_t block = free_.Take();
  // Nothing writes to it before a read does.
  if (block == BlockStack::kNone) return std::make_shared_for_overwrite<char[]>(kBlockBytes);
  return Block(begin_ + block * kBlockBytes, [this, block](char*) { free_.GiveBack(block); });
}

}  // namespace attend

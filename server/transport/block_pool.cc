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
  const size_t rounded_bytes =
      (static_cast<size_t>(bytes) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* const mapped = mmap(nullptr, rounded_bytes + kHugePageBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return;
  mapped_ = mapped;
  mapped_bytes_ = rounded_bytes + kHugePageBytes;
  const size_t misalignment = reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes;
  begin_ = static_cast<char*>(mapped) + (kHugePageBytes - misalignment) % kHugePageBytes;
  // Huge pages fault in and page-lock faster. Advisory only.
  (void)madvise(begin_, rounded_bytes, MADV_HUGEPAGE);
  block_count_ = rounded_bytes / kBlockBytes;
  free_links_ = std::make_unique<std::atomic<uint32_t>[]>(block_count_);
  free_.Make(free_links_.get(), static_cast<uint32_t>(block_count_));
}

BlockPool::~BlockPool() {
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

BlockPool::Block BlockPool::Take() {
  const uint32_t block = free_.Take();
  // Not zeroed, because reads overwrite it.
  if (block == BlockStack::kNone) return std::make_shared_for_overwrite<char[]>(kBlockBytes);
  return Block(begin_ + block * kBlockBytes, [this, block](char*) { free_.GiveBack(block); });
}

}  // namespace attend

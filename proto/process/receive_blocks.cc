// SPDX-License-Identifier: Apache-2.0
//
// malloc looks at the size only, free at the address only: blocks.Contains is one load and one
// comparison, so memory that is not a block costs almost nothing extra. The first malloc runs
// before any constructor and without other threads; everything here is constant-initialised, and
// the range is published last.

#include "proto/process/receive_blocks.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "proto/process/block_stack.h"
#include "proto/process/process_settings.h"

namespace attend {
namespace {

// gRPC adds a header of about 40 bytes to each buffer. The room for it also shifts neighbouring
// buffers, whose first lines would otherwise map to the same cache set.
constexpr size_t kHeaderBytesMax = 512;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// Zeroed memory, never unmapped. Null: the system refuses.
void* Map(size_t bytes) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

// Blocks of one size, side by side. Constant-initialised: malloc is called before any constructor.
template <size_t kBufferBytes>
class BlockPool {
 public:
  static constexpr size_t kStride = kBufferBytes + kHeaderBytesMax;

  // Whether an allocation of `bytes` is one of these buffers plus its header.
  static constexpr bool IsFor(size_t bytes) { return bytes - kBufferBytes - 1 < kHeaderBytesMax; }

  // `count` blocks at `begin`. False: no memory for the links.
  bool Make(char* begin, size_t count) {
    if (count >= BlockStack::kNone / 2) return false;
    void* const links = Map(std::max<size_t>(count, 1) * sizeof(std::atomic<uint32_t>));
    if (links == nullptr) return false;
    begin_ = begin;
    stack_.Make(static_cast<std::atomic<uint32_t>*>(links), static_cast<uint32_t>(count));
    return true;
  }
  void* Take() {
    const uint32_t block = stack_.Take();
    return block == BlockStack::kNone ? nullptr : begin_ + block * kStride;
  }
  void GiveBack(void* data) {
    const auto offset = static_cast<size_t>(static_cast<char*>(data) - begin_);
    // Abort on a pointer that malloc never returned, and on a double free.
    if (offset % kStride != 0 || !stack_.GiveBack(static_cast<uint32_t>(offset / kStride))) {
      std::abort();
    }
  }

 private:
  char* begin_ = nullptr;
  BlockStack stack_;
};

// Two pools in one address range, the large blocks first.
class Blocks {
 public:
  ReceiveBlocks Make(size_t bytes) {
    constexpr size_t kShareOfSmall = 8;
    assert(begin_ == 0 && "the blocks are made once");
    if (bytes == 0) return {};
    // Huge pages fault in faster. The advice may be ignored.
    const size_t whole = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* const mapped = Map(whole + kHugePageBytes);
    if (mapped == nullptr) return {};
    const size_t past = reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes;
    char* const begin = static_cast<char*>(mapped) + (kHugePageBytes - past) % kHugePageBytes;
    (void)madvise(begin, whole, MADV_HUGEPAGE);
    const size_t small = whole / kShareOfSmall / small_.kStride;
    large_bytes_ = whole - small * small_.kStride;
    begin_ = reinterpret_cast<uintptr_t>(begin);
    // Frees on other threads consult the range, so it must be set before the first block exists.
    bytes_.store(whole, std::memory_order_release);
    if (!small_.Make(begin + large_bytes_, small) ||
        !large_.Make(begin, large_bytes_ / large_.kStride)) {
      return {};
    }
    return {begin, static_cast<int64_t>(whole)};
  }

  // Null: another size, or all blocks of this size are in use.
  void* Take(size_t bytes) {
    if (large_.IsFor(bytes)) return large_.Take();
    return small_.IsFor(bytes) ? small_.Take() : nullptr;
  }
  bool Contains(const void* data) const {
    // 0 until there are blocks; begin_ is not read then.
    const size_t bytes = bytes_.load(std::memory_order_acquire);
    return bytes != 0 && reinterpret_cast<uintptr_t>(data) - begin_ < bytes;
  }
  // The next two require Contains(data).
  size_t BlockBytes(const void* data) const {
    return IsLarge(data) ? large_.kStride : small_.kStride;
  }
  void GiveBack(void* data) { IsLarge(data) ? large_.GiveBack(data) : small_.GiveBack(data); }

 private:
  bool IsLarge(const void* data) const {
    return reinterpret_cast<uintptr_t>(data) - begin_ < large_bytes_;
  }

  // Constant after Make, on a cache line that is never written again.
  alignas(64) std::atomic<size_t> bytes_{0};
  uintptr_t begin_ = 0;
  size_t large_bytes_ = 0;
  alignas(64) BlockPool<size_t{64} << 10> large_;
  alignas(64) BlockPool<size_t{8} << 10> small_;
};

// One per process, as malloc is. A few unused bytes until blocks are made.
constinit Blocks blocks;

}  // namespace

ReceiveBlocks ReserveReceiveBlocks(int64_t bytes) {
  if (!kMallocHasBlocks) return {};
  static const ReceiveBlocks made = blocks.Make(static_cast<size_t>(std::max<int64_t>(bytes, 0)));
  return made;
}

TunedAllocator TuneAllocatorAndBlocks(int64_t bytes, int arenas) {
  TunedAllocator made;
  made.blocks = ReserveReceiveBlocks(bytes);
  made.tuned = TuneAllocator(made.blocks.bytes > 0 ? arenas : 1);
  return made;
}

}  // namespace attend

#if ATTEND_MALLOC_HAS_BLOCKS

namespace attend {
namespace {

// The next definition of each function: glibc's, or a preloaded library's. The first call looks all
// of them up, long before main: later, dlsym would touch the thread's dlerror state, and malloc may
// be called while that is being changed.
class Next {
 public:
  void* Malloc(size_t bytes) { return Found().malloc_(bytes); }
  void Free(void* data) {
    if (finding_) return;  // from dlsym itself; leaked once
    Found().free_(data);
  }
  void* Realloc(void* data, size_t bytes) { return Found().realloc_(data, bytes); }
  size_t UsableSize(void* data) { return Found().usable_size_(data); }

 private:
  Next& Found() {
    if (!found_.load(std::memory_order_acquire)) Find();
    return *this;
  }
  void Find() {
    finding_ = true;
    Find("malloc", malloc_);
    Find("free", free_);
    Find("realloc", realloc_);
    Find("malloc_usable_size", usable_size_);
    finding_ = false;
    found_.store(true, std::memory_order_release);
  }
  template <typename Function>
  static void Find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    if (function == nullptr) std::abort();
  }

  std::atomic<bool> found_{false};
  bool finding_ = false;  // only while the process has one thread
  void* (*malloc_)(size_t) = nullptr;
  void (*free_)(void*) = nullptr;
  void* (*realloc_)(void*, size_t) = nullptr;
  size_t (*usable_size_)(void*) = nullptr;
};

constinit Next next;

}  // namespace
}  // namespace attend

// Exported whatever the visibility flags: libraries must use these too. calloc, aligned_alloc and
// the like stay glibc's; blocks are told from other memory by address.
#define ATTEND_EXPORT extern "C" __attribute__((visibility("default")))

ATTEND_EXPORT void* malloc(size_t bytes) {
  void* const block = attend::blocks.Take(bytes);
  return block != nullptr ? block : attend::next.Malloc(bytes);
}

ATTEND_EXPORT void free(void* data) {
  if (!attend::blocks.Contains(data)) return attend::next.Free(data);
  attend::blocks.GiveBack(data);
}

ATTEND_EXPORT void* realloc(void* data, size_t bytes) {
  if (!attend::blocks.Contains(data)) return attend::next.Realloc(data, bytes);
  const size_t block_bytes = attend::blocks.BlockBytes(data);
  if (bytes > block_bytes / 2 && bytes <= block_bytes) return data;
  void* const moved = bytes == 0 ? nullptr : malloc(bytes);
  if (moved != nullptr) std::memcpy(moved, data, std::min(bytes, block_bytes));
  if (moved != nullptr || bytes == 0) attend::blocks.GiveBack(data);
  return moved;
}

// glibc's reallocarray calls realloc; other implementations may not.
ATTEND_EXPORT void* reallocarray(void* data, size_t count, size_t bytes) {
  size_t all;
  if (!__builtin_mul_overflow(count, bytes, &all)) return realloc(data, all);
  errno = ENOMEM;
  return nullptr;
}

ATTEND_EXPORT size_t malloc_usable_size(void* data) {
  return attend::blocks.Contains(data) ? attend::blocks.BlockBytes(data)
                                       : attend::next.UsableSize(data);
}

#endif  // ATTEND_MALLOC_HAS_BLOCKS

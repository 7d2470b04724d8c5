// SPDX-License-Identifier: Apache-2.0

#include "proto/receive_blocks.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "proto/block_stack.h"
#include "proto/process_settings.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ATTEND_MALLOC 1
#endif

namespace attend {
namespace {

// gRPC puts a header before each buffer, of some 40 bytes. The room for it also sets neighbours
// apart, whose first lines would else share one set of a cache.
constexpr size_t kHeaderBytesMax = 512;
constexpr size_t kHugePageBytes = size_t{2} << 20;

// Blocks of one size, side by side. Constant-initialised: malloc is called before any constructor.
class BlockPool {
 public:
  constexpr explicit BlockPool(size_t buffer_bytes) : buffer_bytes_(buffer_bytes) {}

  size_t stride() const { return buffer_bytes_ + kHeaderBytesMax; }
  // Whether so many bytes are one of these buffers and its header.
  bool IsFor(size_t bytes) const { return bytes - buffer_bytes_ - 1 < kHeaderBytesMax; }

  // Blocks that fit into `bytes` at `begin`; the bytes that they take.
  size_t Make(char* begin, size_t bytes) {
    const auto count =
        static_cast<uint32_t>(std::min<size_t>(bytes / stride(), BlockStack::kNone - 1));
    next_ = std::make_unique<std::atomic<uint32_t>[]>(count).release();  // as long as malloc is
    begin_ = begin;
    stack_.Fill(next_, count);
    return count * stride();
  }
  void* Take() {
    const uint32_t block = stack_.Take();
    return block == BlockStack::kNone ? nullptr : begin_ + block * stride();
  }
  void GiveBack(void* data) {
    const auto offset = static_cast<size_t>(static_cast<char*>(data) - begin_);
    if (offset % stride() != 0) std::abort();  // nothing that malloc ever returned
    stack_.GiveBack(static_cast<uint32_t>(offset / stride()));
  }

 private:
  const size_t buffer_bytes_;
  char* begin_ = nullptr;
  std::atomic<uint32_t>* next_ = nullptr;
  BlockStack stack_;
};

// Two pools in one range, the large blocks first.
class Blocks {
 public:
  ReceiveBlocks Make(size_t bytes) {
    constexpr size_t kShareOfSmall = 8;
    const size_t small_bytes = bytes / kShareOfSmall;
    if (small_bytes < small_.stride() || bytes - small_bytes < large_.stride()) return {};
    // Huge pages are faulted in and page-locked faster. That is only advice.
    const size_t whole = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* const mapped = mmap(nullptr, whole + kHugePageBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return {};
    const size_t past = reinterpret_cast<uintptr_t>(mapped) % kHugePageBytes;
    char* const begin = static_cast<char*>(mapped) + (kHugePageBytes - past) % kHugePageBytes;
    (void)madvise(begin, whole, MADV_HUGEPAGE);
    const size_t large_bytes = whole - small_bytes / small_.stride() * small_.stride();
    // Whoever frees memory looks at the range, so it is there before the first block is.
    begin_.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_relaxed);
    large_bytes_.store(large_bytes, std::memory_order_relaxed);
    bytes_.store(whole, std::memory_order_release);
    large_.Make(begin, large_bytes);
    small_.Make(begin + large_bytes, whole - large_bytes);
    return {begin, static_cast<int64_t>(whole)};
  }

  // Null: the request is of other sizes, or all blocks of its size are in use.
  void* Take(size_t bytes) {
    if (large_.IsFor(bytes)) return large_.Take();
    return small_.IsFor(bytes) ? small_.Take() : nullptr;
  }
  // The pool that has `data`. Null: it is none of the blocks.
  BlockPool* PoolOf(const void* data) {
    const size_t bytes = bytes_.load(std::memory_order_acquire);
    const uintptr_t begin = begin_.load(std::memory_order_relaxed);
    const uintptr_t offset = reinterpret_cast<uintptr_t>(data) - begin;
    if (offset >= bytes) return nullptr;
    return offset < large_bytes_.load(std::memory_order_relaxed) ? &large_ : &small_;
  }

 private:
  BlockPool large_{size_t{64} << 10};
  BlockPool small_{size_t{8} << 10};
  std::atomic<uintptr_t> begin_{0};
  std::atomic<size_t> large_bytes_{0};
  std::atomic<size_t> bytes_{0};  // 0 until there are blocks
};

#if defined(ATTEND_MALLOC)

// One for the process, as malloc is.
constinit Blocks blocks;

// The same functions of whatever comes after this program: glibc's, or preloaded ones. All are
// looked up by the first call, which comes before main: later, dlsym would touch the thread's state
// of dlerror, in whose midst malloc may be called.
class Next {
 public:
  void* Malloc(size_t bytes) { return Found().malloc_(bytes); }
  void Free(void* data) { Found().free_(data); }
  void* Realloc(void* data, size_t bytes) { return Found().realloc_(data, bytes); }
  size_t UsableSize(void* data) { return Found().usable_size_(data); }

 private:
  Next& Found() {
    if (!found_.load(std::memory_order_acquire)) Find();
    return *this;
  }
  void Find() {  // any threads at once: they find the same
    Find("malloc", malloc_);
    Find("free", free_);
    Find("realloc", realloc_);
    Find("malloc_usable_size", usable_size_);
    found_.store(true, std::memory_order_release);
  }
  template <typename Function>
  static void Find(const char* name, std::atomic<Function*>& function) {
    function.store(reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name)), std::memory_order_relaxed);
  }

  std::atomic<bool> found_{false};
  std::atomic<void* (*)(size_t)> malloc_{nullptr};
  std::atomic<void (*)(void*)> free_{nullptr};
  std::atomic<void* (*)(void*, size_t)> realloc_{nullptr};
  std::atomic<size_t (*)(void*)> usable_size_{nullptr};
};

constinit Next next;

#endif

}  // namespace

ReceiveBlocks ReserveReceiveBlocks([[maybe_unused]] int64_t bytes) {
#if defined(ATTEND_MALLOC)
  static const ReceiveBlocks made = blocks.Make(static_cast<size_t>(std::max<int64_t>(bytes, 0)));
  return made;
#else
  return {};
#endif
}

TunedAllocator TuneAllocatorAndBlocks(int64_t bytes) {
  TunedAllocator made;
  made.blocks = ReserveReceiveBlocks(bytes == 0 ? kReceiveBlocksBytes : bytes);
  made.tuned = TuneAllocator(made.blocks.bytes > 0 ? Arenas::kMany : Arenas::kOne);
  return made;
}

}  // namespace attend

#if defined(ATTEND_MALLOC)

extern "C" {

// Whatever else gives memory (calloc, aligned_alloc) is left as it is, as blocks are told from
// other memory by where they lie.
void* malloc(size_t bytes) {
  void* const block = attend::blocks.Take(bytes);
  return block != nullptr ? block : attend::next.Malloc(bytes);
}

void free(void* data) {
  attend::BlockPool* const pool = attend::blocks.PoolOf(data);
  if (pool == nullptr) return attend::next.Free(data);
  pool->GiveBack(data);
}

void* realloc(void* data, size_t bytes) {
  attend::BlockPool* const pool = attend::blocks.PoolOf(data);
  if (pool == nullptr) return attend::next.Realloc(data, bytes);
  if (pool->IsFor(bytes)) return data;
  void* const moved = bytes == 0 ? nullptr : malloc(bytes);
  if (moved != nullptr) std::memcpy(moved, data, std::min(bytes, pool->stride()));
  if (moved != nullptr || bytes == 0) pool->GiveBack(data);
  return moved;
}

size_t malloc_usable_size(void* data) {
  attend::BlockPool* const pool = attend::blocks.PoolOf(data);
  return pool == nullptr ? attend::next.UsableSize(data) : pool->stride();
}

}  // extern "C"

#endif

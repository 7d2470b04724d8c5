// SPDX-License-Identifier: Apache-2.0

#include "server/receive_memory.h"

#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace attend {
namespace {

// What malloc still takes from the heap and does not map by itself.
constexpr int64_t kPieceBytes = int64_t{32} << 20;
constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;

struct Range {
  uintptr_t begin = UINTPTR_MAX;
  uintptr_t end = 0;
};

// Other allocators (preloaded, a sanitizer's) may take memory from the heap too, and give its pages
// back behind a lock: a GPU would go on reading the old ones.
bool MallocIsGlibcs() {
  // By name, as an address taken here may be this program's own entry for the function.
  Dl_info of_malloc, of_libc;
  return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &of_malloc) != 0 &&
         dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &of_libc) != 0 &&
         of_malloc.dli_fbase == of_libc.dli_fbase;
}

// Makes the heap have at least `bytes` free, from its first large free piece to its end. The range
// of these, in whole pages; empty if malloc takes memory from elsewhere.
Range GrowHeap(int64_t bytes) {
  Range range;
  std::vector<void*> pieces(static_cast<size_t>((bytes + kPieceBytes - 1) / kPieceBytes));
  bool in_heap = true;
  for (void*& piece : pieces) {
    piece = std::malloc(static_cast<size_t>(kPieceBytes));
    const auto begin = reinterpret_cast<uintptr_t>(piece);
    const auto end = begin + static_cast<uintptr_t>(kPieceBytes);
    in_heap &= piece != nullptr && end <= reinterpret_cast<uintptr_t>(sbrk(0));
    range.begin = std::min(range.begin, begin);
    range.end = std::max(range.end, end);
  }
  for (void* piece : pieces) std::free(piece);
  if (!in_heap || range.begin >= range.end) return {};
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  range.begin = (range.begin + page - 1) / page * page;
  range.end = range.end / page * page;
  return range.begin < range.end ? range : Range{};
}

// Faults fewer, and page-locks faster. Only advice.
void AskForHugePages(const Range& range) {
  const uintptr_t begin = (range.begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = range.end / kHugePageBytes * kHugePageBytes;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

std::unique_ptr<ReceiveMemory> ReceiveMemory::Make(HostAllocator& allocator, int64_t bytes,
                                                   std::string* why) {
  if (!MallocIsGlibcs()) {
    *why = "malloc is not glibc's";
    return nullptr;
  }
#ifdef __GLIBC__
  // Whatever was set before: what lies at the heap's end is never given back.
  if (mallopt(M_TRIM_THRESHOLD, -1) != 1) {
    *why = "malloc cannot be kept from giving memory back";
    return nullptr;
  }
#endif
  const Range range = GrowHeap(bytes);
  if (range.end == 0) {
    *why = "malloc does not take memory from one heap that grows";
    return nullptr;
  }
  AskForHugePages(range);
  auto* const begin = reinterpret_cast<void*>(range.begin);
  const auto locked = static_cast<int64_t>(range.end - range.begin);
  const Status status = allocator.Register(begin, locked);
  if (!status.ok()) {
    *why = status.message();
    return nullptr;
  }
  // Where the process may: then malloc_trim, which nothing here calls, cannot give back pages amid
  // the heap either.
  (void)mlock(begin, static_cast<size_t>(locked));
  auto memory = std::make_unique<ReceiveMemory>(begin, locked);
  memory->allocator_ = &allocator;
  return memory;
}

ReceiveMemory::~ReceiveMemory() {
  if (allocator_ == nullptr) return;
  allocator_->Unregister(const_cast<void*>(begin_), bytes_);
  (void)munlock(begin_, static_cast<size_t>(bytes_));
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/host_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

namespace attend {
namespace {

// More than any machine can address, and small enough that rounding up cannot overflow.
constexpr int64_t kMappedBytesMax = int64_t{1} << 60;

int64_t RoundUp(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

Result<void*> MapHostMemory(int64_t bytes) {
  if (bytes < 0) {
    return InvalidArgument("host block of " + std::to_string(bytes) + " bytes, must be at least 0");
  }
  const int64_t physical = PhysicalMemoryBytes();
  const Status none = ResourceExhausted("no host memory for a block of " + std::to_string(bytes) +
                                        " bytes, the machine has " + std::to_string(physical));
  if (bytes > kMappedBytesMax) return none;
  // Map one huge page too many, so that an aligned range fits; unmap the rest on either side.
  const int64_t size = RoundUp(bytes);
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(size + kHugePageBytes), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return none;
  char* const begin = static_cast<char*>(mapped);
  const int64_t residue = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin)) % kHugePageBytes;
  const int64_t before = residue == 0 ? 0 : kHugePageBytes - residue;
  char* const data = begin + before;
  if (before > 0) munmap(begin, static_cast<size_t>(before));
  munmap(data + size, static_cast<size_t>(kHugePageBytes - before));
  madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // a hint: the kernel may refuse it
  return data;
}

void AdviseHugePages(void* data, int64_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto size = static_cast<uintptr_t>(kHugePageBytes);
  const uintptr_t first = (begin + size - 1) / size * size;
  const uintptr_t end = (begin + static_cast<uintptr_t>(bytes)) / size * size;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void UnmapHostMemory(void* data, int64_t bytes) {
  if (data != nullptr) munmap(data, static_cast<size_t>(RoundUp(bytes)));
}

}  // namespace attend

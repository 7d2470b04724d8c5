// SPDX-License-Identifier: Apache-2.0
//
// Every page is allocated with fallocate before the region is handed out, then the size is sealed
// and the pages are locked. So nothing a client does to the file, and no lack of memory, can turn
// an access by the server into SIGBUS.

#include "server/regions/region_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace attend {
namespace {

Status NoMemory(const char* call, int64_t bytes) {
  return ResourceExhausted("no shared memory for a region of " + std::to_string(bytes) +
                           " bytes: " + call + ": " + std::strerror(errno));
}

// The memory available according to the kernel; 0 if it does not say.
int64_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:")) return std::atoll(line.c_str() + 13) * 1024;
  }
  return 0;
}

// Allocates every page now, so that lack of memory is an error here rather than a signal on a later
// access. Returns 0, or -1 with errno.
int TakePages(int file, int64_t bytes) {
  int taken;
  do {
    taken = fallocate(file, 0, 0, static_cast<off_t>(bytes));
  } while (taken != 0 && errno == EINTR);
  return taken;
}

}  // namespace

MemfdMemory::MemfdMemory(HostAllocator& allocator)
    : allocator_(allocator), page_bytes_(sysconf(_SC_PAGESIZE)) {}

Result<RegionMapping> MemfdMemory::Map(int64_t bytes) {
  // If asked for more than is available, the kernel would kill processes before it refuses.
  const int64_t available = AvailableBytes();
  if (available > 0 && bytes > available) {
    return ResourceExhausted("no shared memory for a region of " + std::to_string(bytes) +
                             " bytes: the machine has " + std::to_string(available) + " left");
  }
  RegionMapping mapping;
  mapping.bytes = bytes;
  mapping.file = UniqueFd(memfd_create("attend-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!mapping.file.valid()) return NoMemory("memfd_create", bytes);
  const int file = mapping.file.get();
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) return NoMemory("ftruncate", bytes);
  if (TakePages(file, bytes) != 0) return NoMemory("fallocate", bytes);
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Internal(std::string("cannot seal a region: ") + std::strerror(errno));
  }
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_POPULATE, file, 0);
  if (data == MAP_FAILED) return NoMemory("mmap", bytes);
  if (Status locked = allocator_.Register(data, bytes); !locked.ok()) {
    munmap(data, static_cast<size_t>(bytes));
    return locked;
  }
  mapping.data = data;
  return mapping;
}

void MemfdMemory::Unlock(void* data, int64_t bytes) { allocator_.Unregister(data, bytes); }

void MemfdMemory::Unmap(void* data, int64_t bytes, Pages pages) {
  const auto size = static_cast<size_t>(bytes);
  // Otherwise they would stay as long as anyone has the file. They are not locked any more, and the
  // file is not sealed against writing, so this cannot fail.
  if (pages == Pages::kFreed) madvise(data, size, MADV_REMOVE);
  munmap(data, size);
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// A file that a client shares as memory (shm_open): read and written, never mapped. The client can
// change its size at any time, so each read and write says if bytes are missing; a mapping would
// end the process. Immutable; any thread. Calls copy, and wait for nothing but pages.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

class SharedFile {
 public:
  // Which files may be opened: those of `owner` with one name, whose key begins with `prefix`, as
  // "/attend", in `folder`.
  struct Rules {
    std::string prefix;
    uid_t owner = 0;
    std::string folder = "/dev/shm";
  };

  // `key` is as shm_open takes it. INVALID_ARGUMENT, NOT_FOUND or PERMISSION_DENIED say what is
  // wrong with it, RESOURCE_EXHAUSTED that no descriptor is left.
  static Result<SharedFile> Open(const std::string& key, const Rules& rules);

  const std::string& key() const { return key_; }
  // Bytes that the file has now; negative if the system does not say.
  int64_t Size() const;
  // INVALID_ARGUMENT if the file ends before `offset` + `bytes`, RESOURCE_EXHAUSTED if no memory is
  // left for its pages, INTERNAL names another error of the system. A write never makes the file
  // longer, unless its client cuts it off at that moment.
  Status Read(int64_t offset, void* to, int64_t bytes) const;
  Status Write(int64_t offset, const void* from, int64_t bytes) const;

 private:
  SharedFile(std::string key, UniqueFd file) : key_(std::move(key)), file_(std::move(file)) {}
  Status TooShort(int64_t offset, int64_t bytes) const;

  std::string key_;
  UniqueFd file_;
};

}  // namespace attend

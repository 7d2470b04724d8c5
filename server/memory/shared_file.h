// SPDX-License-Identifier: Apache-2.0
//
// A file that a client shares as memory (shm_open). It is read and written, never mapped: the
// client may truncate it at any time, which a read reports but a mapping answers with SIGBUS.
// Immutable; any thread. Calls copy, and block for page-ins only.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

class SharedFile {
 public:
  // The files that may be opened: regular files of `owner` with a single name in `folder` whose key
  // begins with `prefix`, e.g. "/attend".
  struct Rules {
    std::string prefix;
    uid_t owner = 0;
    std::string folder = "/dev/shm";
  };

  // `key` is as for shm_open. INVALID_ARGUMENT, NOT_FOUND or PERMISSION_DENIED name the fault;
  // RESOURCE_EXHAUSTED: no descriptor or memory is left.
  static Result<SharedFile> Open(const std::string& key, const Rules& rules);

  const std::string& key() const { return key_; }
  // The current size in bytes; negative on a system error.
  int64_t Size() const;
  // INVALID_ARGUMENT if the file ends before `offset` + `bytes`, RESOURCE_EXHAUSTED if there is no
  // memory for its pages, INTERNAL for other system errors. A write can extend the file only if its
  // client truncates it at that moment.
  Status Read(int64_t offset, void* to, int64_t bytes) const;
  Status Write(int64_t offset, const void* from, int64_t bytes) const;

 private:
  SharedFile(std::string key, UniqueFd file) : key_(std::move(key)), file_(std::move(file)) {}
  Status TooShort(int64_t offset, int64_t bytes) const;

  std::string key_;
  UniqueFd file_;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Detects whether a file has been replaced or changed. Needs no descriptor, so it works when none
// are left.

#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

namespace attend {

// All zero if the file does not exist.
struct FileStamp {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t bytes = 0;
  int64_t changed_ns = 0;

  bool operator==(const FileStamp&) const = default;
};

// Follows links, because Kubernetes updates mounted files by replacing a link.
inline FileStamp StampOf(const std::string& path) {
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return {};
  return {found.st_dev, found.st_ino, found.st_size,
          found.st_mtim.tv_sec * int64_t{1'000'000'000} + found.st_mtim.tv_nsec};
}

}  // namespace attend

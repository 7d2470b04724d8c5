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
  int64_t modified_ns = 0;
  int64_t changed_ns = 0;  // also by a change of its permissions

  bool operator==(const FileStamp&) const = default;
};

// Follows links, because Kubernetes updates mounted files by replacing a link.
inline FileStamp StampOf(const std::string& path) {
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return {};
  const auto ns = [](const timespec& time) {
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
  };
  return {found.st_dev, found.st_ino, found.st_size, ns(found.st_mtim), ns(found.st_ctim)};
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Whole-file reading and writing, with errors that name the file. Internal to the client's tools.

#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "kernels/util/status.h"

namespace attend::client {

inline constexpr size_t kRankMax = 32;  // dimensions of a tensor in a file

struct FileCloser {
  void operator()(FILE* file) const { std::fclose(file); }
};

// An open file of known size.
class InputFile {
 public:
  static Result<InputFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  // Reads exactly `bytes` more, or fails.
  Status Read(void* to, int64_t bytes);
  // `why`, prefixed with the file's name.
  Status Error(const std::string& why) const { return InvalidArgument(path_ + ": " + why); }

 private:
  std::string path_;
  int64_t size_ = 0;
  std::unique_ptr<FILE, FileCloser> file_;
};

struct Piece {
  const void* data;
  int64_t bytes;
};

// Checks that a file can be written at this path. Leaves no file behind.
Status CheckWritable(const std::string& path);

// Replaces the file atomically: writes beside it, then renames.
Status WriteFile(const std::string& path, const std::vector<Piece>& pieces);

Result<std::string> ReadWholeFile(const std::string& path);

}  // namespace attend::client

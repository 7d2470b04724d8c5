// SPDX-License-Identifier: Apache-2.0

#include "server/util/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "server/util/random_token.h"
#include "server/util/unique_fd.h"

namespace attend {
namespace {

bool WriteAll(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

Result<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max) {
  const auto failed = [&](int error) {
    return InvalidArgument(path + " cannot be read: " + std::strerror(error));
  };
  // O_NONBLOCK: opening a pipe would wait for its writer.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return failed(errno);
  struct stat about {};
  if (fstat(file.get(), &about) != 0) return failed(errno);
  if (!S_ISREG(about.st_mode)) return InvalidArgument(path + " is not a regular file");
  std::string text;
  for (;;) {
    char block[16 << 10];
    const ssize_t got = read(file.get(), block, sizeof(block));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(errno);
    if (got == 0) return text;
    text.append(block, static_cast<size_t>(got));
    if (static_cast<int64_t>(text.size()) > bytes_max) {
      return InvalidArgument(path + " has more than " + std::to_string(bytes_max) + " bytes");
    }
  }
}

Status WriteWholeFile(std::string_view what, const std::string& path, std::string_view bytes) {
  const auto failed = [&](int error) {
    return Internal(std::string(what) + " " + path + " cannot be written: " + std::strerror(error));
  };
  const Result<std::string> token = RandomToken();
  if (!token.ok()) return token.status();
  const std::string partial = path + "." + HexText(*token) + ".partial";
  // Not mkstemp, whose file would be readable by this user only.
  UniqueFd file(open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!file.valid()) return failed(errno);
  if (WriteAll(file.get(), bytes) && rename(partial.c_str(), path.c_str()) == 0) return Status();
  const int error = errno;
  unlink(partial.c_str());
  return failed(error);
}

Status CheckFolderOf(std::string_view what, const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (folder.empty() || std::filesystem::is_directory(folder, error)) return Status();
  return Status(Code::kNotFound,
                std::string(what) + " " + path + ": missing folder " + folder.string());
}

}  // namespace attend

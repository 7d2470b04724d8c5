// SPDX-License-Identifier: Apache-2.0

#include "server/util/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

Result<std::string> ReadWholeFile(const std::string& path, int64_t bytes_max, mode_t* mode) {
  const auto failed = [&](int error) {
    return Unavailable(path + " cannot be read: " + std::strerror(error));
  };
  // O_NONBLOCK: opening a pipe would wait for its writer.
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about {};
  if (!file.valid() || fstat(file.get(), &about) != 0) return failed(errno);
  if (!S_ISREG(about.st_mode)) return InvalidArgument(path + " is not a regular file");
  if (mode != nullptr) *mode = about.st_mode;
  // Room for one byte more, which tells the end. As a secret may be read, no copy is left behind.
  std::string text(static_cast<size_t>(std::min<int64_t>(about.st_size, bytes_max)) + 1, '\0');
  for (size_t bytes = 0;;) {
    const ssize_t got = read(file.get(), text.data() + bytes, text.size() - bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(errno);
    bytes += static_cast<size_t>(got);
    if (static_cast<int64_t>(bytes) > bytes_max) {
      return InvalidArgument(path + " has more than " + std::to_string(bytes_max) + " bytes");
    }
    if (got == 0 || bytes == text.size()) text.resize(got == 0 ? bytes : 2 * bytes);
    if (got == 0) return text;
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

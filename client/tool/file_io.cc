// SPDX-License-Identifier: Apache-2.0

#include "client/tool/file_io.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace attend::client {
namespace {

Status SystemError(const std::string& path, const char* what, int error) {
  return Status(error == ENOENT ? Code::kNotFound : Code::kFailedPrecondition,
                path + ": " + what + ": " + std::strerror(error));
}

std::string TemporaryName(const std::string& path) {
  return path + ".tmp" + std::to_string(getpid());
}

}  // namespace

Result<InputFile> InputFile::Open(const std::string& path) {
  InputFile input;
  input.path_ = path;
  input.file_.reset(std::fopen(path.c_str(), "rbe"));
  if (!input.file_) return SystemError(path, "cannot open", errno);
  struct stat info;
  if (fstat(fileno(input.file_.get()), &info) != 0) return SystemError(path, "cannot stat", errno);
  if (!S_ISREG(info.st_mode)) return input.Error("not a regular file");
  input.size_ = info.st_size;
  return input;
}

Status InputFile::Read(void* to, int64_t bytes) {
  const size_t got = std::fread(to, 1, static_cast<size_t>(bytes), file_.get());
  if (got == static_cast<size_t>(bytes)) return Status();
  if (std::ferror(file_.get())) return SystemError(path_, "cannot read", errno);
  return Error("ends too early");
}

Status CheckWritable(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    return SystemError(path, "cannot write", EISDIR);
  }
  const std::string temporary = TemporaryName(path);
  const std::unique_ptr<FILE, FileCloser> file(std::fopen(temporary.c_str(), "wbe"));
  if (!file) return SystemError(path, "cannot create", errno);
  std::remove(temporary.c_str());
  return Status();
}

Status WriteFile(const std::string& path, const std::vector<Piece>& pieces) {
  const std::string temporary = TemporaryName(path);
  std::unique_ptr<FILE, FileCloser> file(std::fopen(temporary.c_str(), "wbe"));
  if (!file) return SystemError(path, "cannot create", errno);
  bool ok = true;
  for (const Piece& piece : pieces) {
    const size_t bytes = static_cast<size_t>(piece.bytes);
    ok = ok && std::fwrite(piece.data, 1, bytes, file.get()) == bytes;
  }
  ok = ok && std::fflush(file.get()) == 0;
  int error = errno;
  if (std::fclose(file.release()) != 0 && ok) {
    ok = false;
    error = errno;
  }
  if (ok && std::rename(temporary.c_str(), path.c_str()) != 0) {
    ok = false;
    error = errno;
  }
  if (ok) return Status();
  std::remove(temporary.c_str());
  return SystemError(path, "cannot write", error);
}

Result<std::string> ReadWholeFile(const std::string& path) {
  Result<InputFile> file = InputFile::Open(path);
  if (!file.ok()) return file.status();
  std::string text(static_cast<size_t>(file->size()), '\0');
  ATTEND_RETURN_IF_ERROR(file->Read(text.data(), file->size()));
  return text;
}

}  // namespace attend::client

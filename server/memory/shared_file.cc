// SPDX-License-Identifier: Apache-2.0

#include "server/memory/shared_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace attend {
namespace {

// NAME_MAX is 255; the key has a slash in front.
constexpr size_t kKeyBytesMax = 256;

Status CheckKey(const std::string& key, const SharedFile::Rules& rules) {
  if (key.size() < 2 || key.size() > kKeyBytesMax) {
    return InvalidArgument("key has " + std::to_string(key.size()) + " bytes, must have 2 to " +
                           std::to_string(kKeyBytesMax));
  }
  const std::string name = key.substr(1);
  const bool plain = key[0] == '/' && name != "." && name != ".." &&
                     name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
  if (!plain) return InvalidArgument("key must be a slash followed by a name without slashes");
  if (key.starts_with(rules.prefix)) return Status();
  return Status(Code::kPermissionDenied,
                "key " + key + " must begin with " + rules.prefix + " (oip-shared-memory)");
}

Status OpenError(const std::string& key, int error) {
  const std::string what = "key " + key + " cannot be opened: " + strerror(error);
  switch (error) {
    case ENOENT:
      return Status(Code::kNotFound, what);
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return ResourceExhausted(what);
    default:
      return Status(Code::kPermissionDenied, what);
  }
}

Status Failed(const std::string& what, const std::string& key, int error) {
  const std::string text = "key " + key + " cannot be " + what + ": " + strerror(error);
  const bool full = error == ENOSPC || error == ENOMEM || error == EDQUOT;
  return full ? ResourceExhausted(text) : Internal(text);
}

}  // namespace

Result<SharedFile> SharedFile::Open(const std::string& key, const Rules& rules) {
  ATTEND_RETURN_IF_ERROR(CheckKey(key, rules));
  // Non-blocking: opening a pipe would wait for its other end.
  UniqueFd file(
      open((rules.folder + key).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY));
  if (!file.valid()) return OpenError(key, errno);
  struct stat about {};
  if (fstat(file.get(), &about) != 0) return OpenError(key, errno);
  if (!S_ISREG(about.st_mode)) {
    return InvalidArgument("key " + key + " is not a regular file");
  }
  if (about.st_uid != rules.owner) {
    return Status(Code::kPermissionDenied,
                  "key " + key + " belongs to user " + std::to_string(about.st_uid) +
                      ", must belong to user " + std::to_string(rules.owner));
  }
  // Another name may be outside what the client may share.
  if (about.st_nlink > 1) {
    return Status(Code::kPermissionDenied, "key " + key + " has " + std::to_string(about.st_nlink) +
                                               " hard links, must have 1");
  }
  return SharedFile(key, std::move(file));
}

int64_t SharedFile::Size() const {
  struct stat about {};
  return fstat(file_.get(), &about) == 0 ? static_cast<int64_t>(about.st_size) : -1;
}

Status SharedFile::TooShort(int64_t offset, int64_t bytes) const {
  return InvalidArgument("key " + key_ + " has " + std::to_string(Size()) +
                         " bytes now, too few for " + std::to_string(bytes) + " at offset " +
                         std::to_string(offset));
}

Status SharedFile::Read(int64_t offset, void* to, int64_t bytes) const {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t got = pread(file_.get(), static_cast<char*>(to) + done,
                              static_cast<size_t>(bytes - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("read", key_, errno);
    if (got == 0) return TooShort(offset, bytes);
    done += got;
  }
  return Status();
}

Status SharedFile::Write(int64_t offset, const void* from, int64_t bytes) const {
  const int64_t size = Size();
  if (bytes > size || offset > size - bytes) return TooShort(offset, bytes);
  for (int64_t done = 0; done < bytes;) {
    const ssize_t put = pwrite(file_.get(), static_cast<const char*>(from) + done,
                               static_cast<size_t>(bytes - done), offset + done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return Failed("written", key_, errno);
    if (put == 0) return Failed("written", key_, ENOSPC);
    done += put;
  }
  return Status();
}

}  // namespace attend

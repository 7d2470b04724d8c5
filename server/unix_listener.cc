// SPDX-License-Identifier: Apache-2.0

#include "server/unix_listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

namespace attend {
namespace {

namespace fs = std::filesystem;

constexpr int kBacklog = 64;

Status Failed(const std::string& path, const std::string& why) {
  return Unavailable("shared-memory-socket " + path + ": " + why);
}

Result<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Failed(path, "the path has " + std::to_string(path.size()) +
                            " characters, must have 1 to " +
                            std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Makes what is missing of `folder`, from the top.
Status MakeFolders(const std::string& path, const fs::path& folder, mode_t mode) {
  std::error_code error;
  if (fs::exists(folder, error)) return Status();
  if (folder.has_parent_path() && folder.parent_path() != folder) {
    ATTEND_RETURN_IF_ERROR(MakeFolders(path, folder.parent_path(), mode));
  }
  if (mkdir(folder.c_str(), mode) == 0 || errno == EEXIST) return Status();
  return Failed(path, "cannot make " + folder.string() + ": " + std::strerror(errno));
}

// The folder, opened; nobody but this user and root can put or replace a socket of ours in it.
Result<UniqueFd> OpenFolder(const std::string& path, const fs::path& folder) {
  UniqueFd opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat about {};
  if (!opened.valid() && lstat(folder.c_str(), &about) == 0 && S_ISLNK(about.st_mode)) {
    return Failed(path, folder.string() + " is a symbolic link; name the folder itself");
  }
  if (!opened.valid() || fstat(opened.get(), &about) != 0) {
    return Failed(path, folder.string() + ": " + std::strerror(errno));
  }
  if (about.st_uid != geteuid() && about.st_uid != 0) {
    return Failed(path, folder.string() + " belongs to user " + std::to_string(about.st_uid));
  }
  const bool others_write = (about.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (others_write && (about.st_mode & S_ISVTX) == 0) {
    return Failed(path, "others may write to " + folder.string());
  }
  return opened;
}

std::string LockPath(const std::string& path) { return path + ".lock"; }

// Two servers must not both find a socket stale, so who listens at `path` holds this lock. The file
// is removed with the socket, by who holds it: a file that is locked but no longer the one at the
// path is nobody's lock.
Result<UniqueFd> TakeLock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  for (;;) {
    UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!lock.valid()) return Failed(path, lock_path + ": " + std::strerror(errno));
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      return Failed(path, errno == EWOULDBLOCK
                              ? "another server owns it (it holds " + lock_path + ")"
                              : lock_path + ": " + std::strerror(errno));
    }
    struct stat mine {
    }, there{};
    if (fstat(lock.get(), &mine) != 0) return Failed(path, std::strerror(errno));
    const bool same = lstat(lock_path.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
                      mine.st_dev == there.st_dev;
    if (same) return lock;
  }
}

// Removes a socket that nobody listens on. OK if nothing is left at the path.
Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat about {};
  if (lstat(path.c_str(), &about) != 0) {
    return errno == ENOENT ? Status() : Failed(path, std::strerror(errno));
  }
  if (!S_ISSOCK(about.st_mode)) return Failed(path, "there is something that is no socket");
  const UniqueFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int connected =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (connected == 0 || errno != ECONNREFUSED) {
    return Failed(path, "another process listens there");
  }
  return unlink(path.c_str()) == 0 ? Status() : Failed(path, std::strerror(errno));
}

}  // namespace

std::string DefaultSocketPath() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string folder = runtime != nullptr && runtime[0] == '/'
                                 ? std::string(runtime) + "/attend"
                                 : "/tmp/attend-" + std::to_string(geteuid());
  return folder + "/shared-memory.sock";
}

Result<UnixListener> ListenAt(const std::string& path, bool any_user) {
  const Result<sockaddr_un> address = AddressOf(path);
  if (!address.ok()) return address.status();
  fs::path folder = fs::path(path).parent_path();
  if (folder.empty()) folder = ".";
  ATTEND_RETURN_IF_ERROR(MakeFolders(path, folder, any_user ? 0755 : 0700));
  const Result<UniqueFd> opened = OpenFolder(path, folder);
  if (!opened.ok()) return opened.status();
  Result<UniqueFd> lock = TakeLock(path);
  if (!lock.ok()) return lock.status();
  ATTEND_RETURN_IF_ERROR(RemoveStale(path, *address));
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  // A socket takes its own mode as its file's, less the umask; set before there is a file, no
  // moment is left in which it is wider.
  const bool listening =
      listener.valid() && fchmod(listener.get(), 0600) == 0 &&
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) == 0 &&
      (!any_user || chmod(path.c_str(), 0666) == 0) && listen(listener.get(), kBacklog) == 0;
  if (!listening) return Failed(path, std::strerror(errno));
  return UnixListener{std::move(listener), std::move(*lock)};
}

void StopListening(const std::string& path, UnixListener* listener) {
  // The file first: who finds it gone does not connect to a socket that nobody serves.
  unlink(path.c_str());
  listener->socket.Reset();
  unlink(LockPath(path).c_str());
  listener->lock.Reset();
}

}  // namespace attend

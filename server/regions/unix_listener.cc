// SPDX-License-Identifier: Apache-2.0
//
// Ownership of the path is an flock on `path`.lock, taken before anything at the path is touched.
// All files are reached through a descriptor of their folder, so replacing the folder cannot
// redirect an operation.

#include "server/regions/unix_listener.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "server/util/assign.h"

namespace attend {
namespace {

namespace fs = std::filesystem;

using Options = UnixListenOptions;

Status Failed(const Options& options, const std::string& why) {
  return Unavailable(options.name + ": " + why);
}

Status FailedBySystem(const Options& options, const std::string& what = "") {
  const std::string why = std::strerror(errno);
  return Failed(options, what.empty() ? why : what + ": " + why);
}

Result<sockaddr_un> AddressOf(const Options& options) {
  const std::string& path = options.path;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return Failed(options, "the path has " + std::to_string(path.size()) +
                               " characters, must have 1 to " +
                               std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Creates the missing folders of `folder`, from the top.
Status MakeFolders(const Options& options, const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder, error)) return Status();
  if (folder.has_parent_path() && folder.parent_path() != folder) {
    ATTEND_RETURN_IF_ERROR(MakeFolders(options, folder.parent_path()));
  }
  const mode_t mode = (options.mode & S_IWOTH) != 0 ? 0755 : 0700;
  if (mkdir(folder.c_str(), mode) == 0 || errno == EEXIST) return Status();
  return FailedBySystem(options, "cannot create " + folder.string());
}

// Checks that only this user and root can replace a socket in the folder. Others may write to a
// folder with the sticky bit, such as /tmp.
Status CheckFolder(const Options& options, const fs::path& folder, int opened) {
  struct stat about {};
  if (fstat(opened, &about) != 0) return FailedBySystem(options, folder.string());
  if (about.st_uid != geteuid() && about.st_uid != 0) {
    return Failed(options, folder.string() + " belongs to user " + std::to_string(about.st_uid) +
                               ", must belong to the server's user or root");
  }
  const bool others_write = (about.st_mode & (S_IWGRP | S_IWOTH)) != 0;
  if (others_write && (about.st_mode & S_ISVTX) == 0) {
    return Failed(options, folder.string() + " is writable by other users");
  }
  return Status();
}

// Opens the folder. From here on its files are accessed through the descriptor.
Result<UniqueFd> OpenFolder(const Options& options) {
  fs::path folder = fs::path(options.path).parent_path();
  if (folder.empty()) folder = ".";
  if (options.own_folder) ATTEND_RETURN_IF_ERROR(MakeFolders(options, folder));
  const int follow = options.own_folder ? O_NOFOLLOW : 0;
  UniqueFd opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | follow));
  struct stat about {};
  if (!opened.valid() && options.own_folder && lstat(folder.c_str(), &about) == 0 &&
      S_ISLNK(about.st_mode)) {
    return Failed(options, folder.string() + " is a symbolic link; name the folder itself");
  }
  if (!opened.valid()) return FailedBySystem(options, folder.string());
  if (options.own_folder) {
    ATTEND_RETURN_IF_ERROR(CheckFolder(options, folder, opened.get()));
  }
  return opened;
}

std::string LockFile(const UnixListener& listener) { return listener.file + ".lock"; }

// Two servers must not both find a socket stale, so the process that listens at a path holds this
// lock. Its holder removes the lock file together with the socket, so a lock counts only if its
// file is still the one at the path.
Status TakeLock(const Options& options, UnixListener& listener) {
  const std::string name = LockFile(listener);
  const std::string path = options.path + ".lock";
  for (;;) {
    UniqueFd lock(openat(listener.folder.get(), name.c_str(),
                         O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!lock.valid()) return FailedBySystem(options, path);
    if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) return FailedBySystem(options, path);
      return Failed(options, "another server is using it (it holds " + path + ")");
    }
    struct stat mine {
    }, there{};
    if (fstat(lock.get(), &mine) != 0) return FailedBySystem(options);
    if (fstatat(listener.folder.get(), name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
        mine.st_ino == there.st_ino && mine.st_dev == there.st_dev) {
      listener.lock = std::move(lock);
      return Status();
    }
  }
}

// Removes a socket on which no process listens. OK if nothing is left at the path.
Status RemoveStale(const Options& options, const sockaddr_un& address,
                   const UnixListener& listener) {
  struct stat about {};
  const int folder = listener.folder.get();
  if (fstatat(folder, listener.file.c_str(), &about, AT_SYMLINK_NOFOLLOW) != 0) {
    return errno == ENOENT ? Status() : FailedBySystem(options);
  }
  if (!S_ISSOCK(about.st_mode)) return Failed(options, "the path exists and is not a socket");
  const UniqueFd probe(socket(AF_UNIX, options.type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int connected =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (connected == 0 || errno != ECONNREFUSED) {
    return Failed(options, "another process is listening on it");
  }
  return unlinkat(folder, listener.file.c_str(), 0) == 0 ? Status() : FailedBySystem(options);
}

// Binds, and sets the file's group and mode before any client can connect.
Status Listen(const Options& options, const sockaddr_un& address, UnixListener& listener) {
  listener.socket = UniqueFd(socket(AF_UNIX, options.type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int socket = listener.socket.get();
  // The mode of the socket, minus the umask, becomes its file's. It is set before the file exists,
  // so that the file's mode is never wider.
  if (socket < 0 || fchmod(socket, 0600) != 0 ||
      bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return FailedBySystem(options);
  }
  const int folder = listener.folder.get();
  const char* const file = listener.file.c_str();
  struct stat about {};
  if (fstatat(folder, file, &about, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISSOCK(about.st_mode)) {
    return Failed(options, "its folder was replaced in the meantime");
  }
  listener.inode = about.st_ino;
  if (options.group != static_cast<gid_t>(-1) &&
      fchownat(folder, file, static_cast<uid_t>(-1), options.group, AT_SYMLINK_NOFOLLOW) != 0) {
    return FailedBySystem(options, "group " + std::to_string(options.group));
  }
  if ((options.mode != 0600 && fchmodat(folder, file, options.mode, 0) != 0) ||
      listen(socket, SOMAXCONN) != 0) {
    return FailedBySystem(options);
  }
  return Status();
}

}  // namespace

std::string DefaultSocketPath() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string folder = runtime != nullptr && runtime[0] == '/'
                                 ? std::string(runtime) + "/attend"
                                 : "/tmp/attend-" + std::to_string(geteuid());
  return folder + "/shared-memory.sock";
}

Result<UnixListener> ListenAt(const UnixListenOptions& options) {
  const Result<sockaddr_un> address = AddressOf(options);
  if (!address.ok()) return address.status();
  UnixListener listener;
  listener.file = fs::path(options.path).filename().string();
  if (listener.file.empty()) return Failed(options, "the path names a folder");
  ATTEND_RETURN_IF_ERROR(Assign(listener.folder, OpenFolder(options)));
  ATTEND_RETURN_IF_ERROR(TakeLock(options, listener));
  Status listening = RemoveStale(options, *address, listener);
  if (listening.ok()) listening = Listen(options, *address, listener);
  if (!listening.ok()) {
    StopListening(&listener);
    return listening;
  }
  return listener;
}

namespace {

// Removes the file `name`, unless another file has replaced it.
void RemoveOwn(int folder, const std::string& name, ino_t inode) {
  struct stat about {};
  if (fstatat(folder, name.c_str(), &about, AT_SYMLINK_NOFOLLOW) == 0 && about.st_ino == inode) {
    unlinkat(folder, name.c_str(), 0);
  }
}

}  // namespace

void StopListening(UnixListener* listener) {
  const int folder = listener->folder.get();
  struct stat lock {};
  // The file first, so that no client connects to a socket that is not served.
  if (listener->inode != 0) RemoveOwn(folder, listener->file, listener->inode);
  listener->socket.Reset();
  if (listener->lock.valid() && fstat(listener->lock.get(), &lock) == 0) {
    RemoveOwn(folder, LockFile(*listener), lock.st_ino);
  }
  listener->lock.Reset();
  listener->inode = 0;
}

}  // namespace attend

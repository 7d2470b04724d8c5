// SPDX-License-Identifier: Apache-2.0

#include "client/memory/socket_trust.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "client/memory/shared_memory.h"

namespace attend::client {
namespace {

bool IsOwnOrRoots(uid_t user) { return user == geteuid() || user == 0; }

// Whether `user` owns the socket's folder and cannot simply have made it before the server did:
// anyone can make one in /tmp.
bool HasFolder(uid_t user, const SharedSocket& at) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::path(at.path).parent_path();
  folder = std::filesystem::canonical(folder.empty() ? "." : folder, error);
  struct stat about {};
  if (error || stat(folder.c_str(), &about) != 0 || about.st_uid != user) return false;
  while (!at.named && folder != folder.root_path()) {
    folder = folder.parent_path();
    if (stat(folder.c_str(), &about) != 0 || !IsOwnOrRoots(about.st_uid) ||
        (about.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

Status CheckListener(int socket, const SharedSocket& at) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return Unavailable(std::string("the shared memory's socket: SO_PEERCRED: ") +
                       std::strerror(errno));
  }
  if (IsOwnOrRoots(peer.uid) || HasFolder(peer.uid, at)) return Status();
  return Status(Code::kPermissionDenied,
                "a process of user " + std::to_string(peer.uid) +
                    " listens at the shared memory's socket " + at.path +
                    ": it is neither this process's user nor root, nor the owner of a folder " +
                    (at.named ? "there" : "that others could not have made"));
}

}  // namespace attend::client

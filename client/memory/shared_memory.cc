// SPDX-License-Identifier: Apache-2.0

#include "client/memory/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "attend/v1/shared_memory.pb.h"

namespace attend::client {
namespace {

constexpr size_t kReplyBytesMax = 4096;
// Unread answers to releases that may pile up: the server ends a connection whose socket is full.
constexpr size_t kUnreadMost = 64;
// How long a SharedMemory's end waits for each answer.
constexpr int kCloseWaitSeconds = 10;

Status Lost(const char* what) {
  return Unavailable(std::string("the shared memory's socket: ") + what + ": " +
                     std::strerror(errno));
}

// The descriptors that came with the packet.
std::vector<int> FilesOf(msghdr& message) {
  std::vector<int> files;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const size_t before = files.size();
    files.resize(before + count);
    std::memcpy(files.data() + before, CMSG_DATA(part), count * sizeof(int));
  }
  return files;
}

// A packet and what came along: at most one descriptor, which the caller closes; more are closed
// here. Returns recvmsg's count.
ssize_t Receive(int socket, int flags, std::string* packet, int* files, int* file) {
  packet->resize(kReplyBytesMax);
  *files = 0;
  *file = -1;
  iovec data{packet->data(), packet->size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t bytes;
  do {
    bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_TRUNC | flags);
  } while (bytes < 0 && errno == EINTR);
  if (bytes <= 0) return bytes;
  const std::vector<int> came = FilesOf(message);
  // What found no room beside them counts as one more.
  *files = static_cast<int>(came.size()) + ((message.msg_flags & MSG_CTRUNC) != 0 ? 1 : 0);
  for (size_t n = 0; n < came.size(); ++n) {
    if (n == 0 && *files == 1) {
      *file = came[n];
    } else {
      close(came[n]);
    }
  }
  packet->resize(std::min(packet->size(), static_cast<size_t>(bytes)));
  return bytes;
}

bool IsReleased(const std::string& packet) {
  v1::RegionReply reply;
  return reply.ParseFromString(packet) && reply.has_released();
}

// Whether the descriptor is memory of `bytes` bytes that nobody can take from under its readers:
// the kernel would end this process by a signal (SIGBUS).
Status CheckRegionFile(int file, int64_t bytes) {
  struct stat about {};
  struct statfs where {};
  if (fstat(file, &about) != 0 || fstatfs(file, &where) != 0) return Lost("a region's descriptor");
  if (about.st_size < bytes) {
    return Internal("the region's descriptor has " + std::to_string(about.st_size) +
                    " bytes, the server's packet says " + std::to_string(bytes));
  }
  // Huge pages may run out after they were mapped, and other files cannot be sealed.
  const int seals = fcntl(file, F_GET_SEALS);
  if (where.f_type == TMPFS_MAGIC && seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return Status();
  return Internal(
      "the region's memory is not sealed against shrinking (memfd_create, "
      "F_SEAL_SHRINK), so it is not mapped");
}

bool IsOwnOrRoots(uid_t user) { return user == geteuid() || user == 0; }

// Whether `user` has the socket's folder, and did not simply make it there before the server did:
// /tmp is everybody's.
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

// Whether the process at the other end is the server.
Status CheckListener(int socket, const SharedSocket& at) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return Lost("SO_PEERCRED");
  if (IsOwnOrRoots(peer.uid) || HasFolder(peer.uid, at)) return Status();
  return Status(Code::kPermissionDenied,
                "a process of user " + std::to_string(peer.uid) +
                    " listens at the shared memory's socket " + at.path +
                    ": it is neither this process's user nor root, nor the owner of a folder " +
                    (at.named ? "there" : "that others could not have made"));
}

}  // namespace

SharedRegion::SharedRegion(std::shared_ptr<SharedMemory> memory, std::string token, std::byte* data,
                           int64_t bytes, std::shared_ptr<DeviceMemory> device)
    : memory_(std::move(memory)),
      token_(std::move(token)),
      data_(data),
      bytes_(bytes),
      device_(std::move(device)) {}

SharedRegion::~SharedRegion() {
  if (device_ == nullptr) munmap(data_, static_cast<size_t>(bytes_));
  if (!released_) memory_->Forget(token_, device_);
}

Result<std::shared_ptr<SharedMemory>> SharedMemory::Connect(const SharedSocket& at,
                                                            const Caller& caller) {
  const std::string& path = at.path;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return InvalidArgument("the shared memory's socket \"" + path + "\" has " +
                           std::to_string(path.size()) + " characters, must have 1 to " +
                           std::to_string(sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (socket < 0) return Lost("socket");
  std::shared_ptr<SharedMemory> memory(new SharedMemory(socket));
  if (connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Unavailable("cannot connect to the shared memory's socket " + path + ": " +
                       std::strerror(errno));
  }
  ATTEND_RETURN_IF_ERROR(CheckListener(socket, at));
  if (!caller.token.empty()) ATTEND_RETURN_IF_ERROR(memory->Identify(caller));
  return memory;
}

Status SharedMemory::Identify(const Caller& caller) {
  v1::RegionRequest request;
  request.mutable_identify()->set_token(caller.token);
  request.mutable_identify()->set_tenant(caller.tenant);
  v1::RegionReply reply;
  int file;
  const Status status = Exchange(request, &reply, &file);
  if (file >= 0) close(file);
  // A server of before does not ask.
  return status.code() == Code::kUnimplemented ? Status() : status;
}

SharedMemory::~SharedMemory() {
  // No other thread has it, so no lock is needed. The host's memory needs no answer.
  const timeval wait{kCloseWaitSeconds, 0};
  setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
  const auto lent = [](const LetGo& memory) {
    return std::any_of(memory.begin(), memory.end(),
                       [](const auto& each) { return each != nullptr; });
  };
  LetGo closed;
  while (lent(unread_) && DropAnswer(0, &closed)) closed.clear();
  // The server still has it open. CUDA does not define what happens to a process that uses freed
  // memory, so the rest stays until this process ends.
  if (lent(unread_)) static_cast<void>(new LetGo(std::move(unread_)));
  close(socket_);
}

int SharedMemory::Send(const v1::RegionRequest& request, int flags) {
  const std::string bytes = request.SerializeAsString();
  ssize_t done;
  do {
    done = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | flags);
  } while (done < 0 && errno == EINTR);
  return done < 0 ? errno : 0;
}

Status SharedMemory::Exchange(const v1::RegionRequest& request, v1::RegionReply* reply, int* file) {
  *file = -1;
  LetGo closed;  // freed without the locks
  const MutexLock exchange_lock(exchange_mutex_);
  int send_error;
  {
    const MutexLock lock(send_mutex_);
    send_error = Send(request, 0);
    closed.swap(unread_);
  }
  std::string packet;
  ssize_t bytes;
  int files;
  for (size_t before = closed.size();; --before) {
    bytes = Receive(socket_, 0, &packet, &files, file);
    // A server that refuses the connection has said why before it closed it.
    if (bytes <= 0 || before == 0) break;
    if (*file >= 0) close(*file);
  }
  if (bytes <= 0) {
    errno = send_error != 0 ? send_error : bytes == 0 ? ECONNRESET : errno;
    return Lost("the server has closed it");
  }
  if (files > 1) return Internal("the server's packet came with more than one descriptor");
  if (bytes > static_cast<ssize_t>(kReplyBytesMax) || !reply->ParseFromString(packet)) {
    return Internal("the server's packet is not a valid RegionReply");
  }
  if (!reply->has_error()) return Status();
  const int code = reply->error().code();
  if (code == 0) return Internal("the server's packet has an error without a code");
  return Status(static_cast<Code>(code), reply->error().message());
}

Result<std::shared_ptr<SharedRegion>> SharedMemory::Create(int64_t bytes) {
  if (bytes < 1) {
    return InvalidArgument("a region of " + std::to_string(bytes) + " bytes, must have at least 1");
  }
  v1::RegionRequest request;
  request.mutable_create()->set_bytes(static_cast<uint64_t>(bytes));
  v1::RegionReply reply;
  int file;
  const Status status = Exchange(request, &reply, &file);
  void* data = MAP_FAILED;
  const int64_t mapped = static_cast<int64_t>(reply.created().bytes());
  const bool valid =
      status.ok() && file >= 0 && mapped >= bytes && !reply.created().token().empty();
  if (status.ok() && reply.has_created() && file < 0) {
    Forget(reply.created().token(), nullptr);
    return Internal("the server's packet came without the region's descriptor");
  }
  const Status unsafe = valid ? CheckRegionFile(file, mapped) : Status();
  if (valid && unsafe.ok()) {
    data = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  const int map_error = errno;
  if (file >= 0) close(file);
  if (!status.ok()) return status;
  if (!valid) return Internal("the server's packet does not describe a valid region");
  if (!unsafe.ok()) {
    Forget(reply.created().token(), nullptr);
    return unsafe;
  }
  if (data == MAP_FAILED) {
    Forget(reply.created().token(), nullptr);
    return ResourceExhausted("a region of " + std::to_string(mapped) +
                             " bytes cannot be mapped: " + std::strerror(map_error));
  }
  return std::shared_ptr<SharedRegion>(new SharedRegion(
      shared_from_this(), reply.created().token(), static_cast<std::byte*>(data), mapped, nullptr));
}

Result<std::shared_ptr<SharedRegion>> SharedMemory::Lend(std::shared_ptr<DeviceMemory> device) {
  v1::RegionRequest request;
  ATTEND_RETURN_IF_ERROR(device->Describe(request.mutable_import_cuda()));
  v1::RegionReply reply;
  int file;
  const Status status = Exchange(request, &reply, &file);
  if (file >= 0) close(file);
  if (!status.ok()) return status;
  if (reply.imported().token().empty()) {
    return Internal("the server's packet has no token");
  }
  std::byte* const data = device->data();
  const int64_t bytes = device->bytes();
  return std::shared_ptr<SharedRegion>(new SharedRegion(
      shared_from_this(), reply.imported().token(), data, bytes, std::move(device)));
}

Status SharedMemory::Release(SharedRegion& region) {
  if (region.memory_.get() != this) {
    return InvalidArgument(
        "the region belongs to another connection to the shared memory's socket");
  }
  if (region.released_.exchange(true)) {
    return Status(Code::kFailedPrecondition, "the region was already released");
  }
  v1::RegionRequest request;
  request.mutable_release()->set_token(region.token_);
  v1::RegionReply reply;
  int file;
  const Status status = Exchange(request, &reply, &file);
  if (file >= 0) close(file);
  // The server may have it open still: Forget keeps it.
  if (!status.ok() && region.device_ != nullptr) region.released_ = false;
  return status;
}

void SharedMemory::Forget(const std::string& token, std::shared_ptr<DeviceMemory> device) {
  v1::RegionRequest request;
  request.mutable_release()->set_token(token);
  {
    const MutexLock lock(send_mutex_);
    // If the connection is at its end, nothing more can be learnt by keeping lent memory. A server
    // that has left hundreds of packets unread is waited for all the same, or it would keep the
    // region.
    int error = Send(request, MSG_DONTWAIT);
    if (error == EAGAIN || error == EWOULDBLOCK) error = Send(request, 0);
    if (error == 0) unread_.push_back(std::move(device));
  }
  DropAnswers();
}

void SharedMemory::DropAnswers() {
  const auto many = [this] {
    const MutexLock lock(send_mutex_);
    return unread_.size() > kUnreadMost;
  };
  LetGo closed;  // freed without the locks
  if (many()) {
    exchange_mutex_.Lock();
  } else if (!exchange_mutex_.TryLock()) {
    return;  // the thread that has the lock reads on, or the next one does
  }
  const MutexLock exchange_lock(exchange_mutex_, std::adopt_lock);
  while (DropAnswer(many() ? 0 : MSG_DONTWAIT, &closed)) {
  }
}

bool SharedMemory::DropAnswer(int flags, LetGo* closed) {
  {
    const MutexLock lock(send_mutex_);
    if (unread_.empty()) return false;
  }
  std::string packet;
  int files, file;
  const ssize_t bytes = Receive(socket_, flags, &packet, &files, &file);
  const bool lost = bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  if (bytes > 0 && file >= 0) close(file);
  if (bytes < 0 && !lost) return false;
  const MutexLock lock(send_mutex_);
  // The error that ends the connection is no answer. What was lent is closed once it is at its end.
  if (!lost && unread_.front() != nullptr && !IsReleased(packet)) return true;
  do {
    closed->push_back(std::move(unread_.front()));
    unread_.pop_front();
  } while (lost && !unread_.empty());
  return true;
}

}  // namespace attend::client

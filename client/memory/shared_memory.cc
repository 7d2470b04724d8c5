// SPDX-License-Identifier: Apache-2.0
//
// Replies come in request order. Forget sends a release and reads no reply, but queues the memory
// in unread_; the next exchange or Forget reads those replies first and only then frees the memory,
// because the server replies after closing it.

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
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "attend/v1/shared_memory.pb.h"
#include "client/memory/socket_trust.h"

namespace attend::client {
namespace {

constexpr size_t kReplyBytesMax = 4096;
// Bound on unread replies to releases: the server ends a connection whose socket is full.
constexpr size_t kUnreadMost = 64;
// How long the destructor waits for each reply.
constexpr std::chrono::seconds kCloseWait{10};
// A Create may take one more `wait` per this many bytes.
constexpr int64_t kBytesPerWait = int64_t{4} << 30;
constexpr int64_t kHoweverLong = INT64_MAX;  // never gives up

Status Lost(const char* what) {
  return Unavailable(std::string("the shared memory's socket: ") + what + ": " +
                     std::strerror(errno));
}

Status Silent(const std::string& what) {
  return Unavailable("the shared memory's socket: the server " + what +
                     " in time: it hangs, or is not an attend server");
}

bool SetWait(int socket, int option, std::chrono::milliseconds wait) {
  const timeval time{wait.count() / 1000, wait.count() % 1000 * 1000};
  return setsockopt(socket, SOL_SOCKET, option, &time, sizeof(time)) == 0;
}

bool IsTimeout(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

bool AnyLent(const std::deque<std::shared_ptr<DeviceMemory>>& memory) {
  return std::any_of(memory.begin(), memory.end(),
                     [](const auto& each) { return each != nullptr; });
}

// The descriptors received with the packet.
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

// Receives a packet and at most one descriptor, which the caller must close; if there are more, all
// are closed here. Returns recvmsg's count.
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
  // Truncated control data means that at least one more was sent.
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

// Checks that the descriptor is memory of at least `bytes` bytes that cannot shrink under its
// readers, which would end this process with SIGBUS.
Status CheckRegionFile(int file, int64_t bytes) {
  struct stat about {};
  struct statfs where {};
  if (fstat(file, &about) != 0 || fstatfs(file, &where) != 0) return Lost("a region's descriptor");
  if (about.st_size < bytes) {
    return Internal("the region's descriptor has " + std::to_string(about.st_size) +
                    " bytes, the server's packet says " + std::to_string(bytes));
  }
  // Only a sealed memfd on tmpfs: huge pages may run out after mapping, other files cannot be
  // sealed.
  const int seals = fcntl(file, F_GET_SEALS);
  if (where.f_type == TMPFS_MAGIC && seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return Status();
  return Internal(
      "the region's memory is not sealed against shrinking (memfd_create, "
      "F_SEAL_SHRINK), so it is not mapped");
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
                                                            const Caller& caller,
                                                            std::chrono::milliseconds wait) {
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
  if (!SetWait(socket, SO_RCVTIMEO, wait) || !SetWait(socket, SO_SNDTIMEO, wait)) {
    return Lost("SO_RCVTIMEO and SO_SNDTIMEO");
  }
  if (connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (IsTimeout(errno)) return Silent("at " + path + " has not taken the connection");
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
  const Status status = Exchange(request, 1, &reply, &file);
  if (file >= 0) close(file);
  // Older servers do not know Identify.
  return status.code() == Code::kUnimplemented ? Status() : status;
}

SharedMemory::~SharedMemory() {
  // No other thread has a reference, so no lock is needed. Host memory needs no reply.
  SetWait(socket_, SO_RCVTIMEO, kCloseWait);
  LetGo closed;
  while (AnyLent(unread_) && DropAnswer(0, &closed)) closed.clear();
  // The server still has the memory open. CUDA does not define what happens to a process that uses
  // freed memory, so the rest is leaked on purpose.
  if (AnyLent(unread_)) static_cast<void>(new LetGo(std::move(unread_)));
  close(socket_);
}

int SharedMemory::Send(const v1::RegionRequest& request, int flags) {
  if (silent_) return ETIMEDOUT;
  const std::string bytes = request.SerializeAsString();
  const bool patient = patient_ || AnyLent(unread_);
  ssize_t done;
  do {
    done = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | flags);
  } while (done < 0 && (errno == EINTR || (patient && flags == 0 && IsTimeout(errno))));
  if (done >= 0) return 0;
  if (flags != 0 || !IsTimeout(errno)) return errno;
  GiveUp();
  return ETIMEDOUT;
}

bool SharedMemory::silent() const {
  const MutexLock lock(send_mutex_);
  return silent_;
}

void SharedMemory::GiveUp() {
  silent_ = true;
  shutdown(socket_, SHUT_RDWR);
}

Status SharedMemory::Exchange(const v1::RegionRequest& request, int64_t waits,
                              v1::RegionReply* reply, int* file) {
  *file = -1;
  LetGo closed;  // destroyed without the locks
  const MutexLock exchange_lock(exchange_mutex_);
  int send_error;
  {
    const MutexLock lock(send_mutex_);
    send_error = Send(request, 0);
    if (silent_) return Silent("has not taken a packet");
    closed.swap(unread_);
    if (AnyLent(closed)) waits = kHoweverLong;
    patient_ = waits == kHoweverLong;
  }
  std::string packet;
  ssize_t bytes;
  int files;
  for (size_t before = closed.size();; --before) {
    do {
      bytes = Receive(socket_, 0, &packet, &files, file);
    } while (bytes < 0 && IsTimeout(errno) && (waits == kHoweverLong || --waits > 0));
    // A server that refuses the connection has sent the reason before closing it, so a failed send
    // is followed by a read.
    if (bytes <= 0 || before == 0) break;
    if (*file >= 0) close(*file);
  }
  {
    const MutexLock lock(send_mutex_);
    patient_ = false;
    if (bytes < 0 && IsTimeout(errno)) GiveUp();
    if (silent_) return Silent("has not answered");
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
  const Status status = Exchange(request, 1 + bytes / kBytesPerWait, &reply, &file);
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
  const Status status = Exchange(request, 1, &reply, &file);
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
  const int64_t waits = region.device_ == nullptr ? 1 : kHoweverLong;
  const Status status = Exchange(request, waits, &reply, &file);
  if (file >= 0) close(file);
  // The server may still have the memory open: Forget keeps it.
  if (!status.ok() && region.device_ != nullptr) region.released_ = false;
  return status;
}

void SharedMemory::Forget(const std::string& token, std::shared_ptr<DeviceMemory> device) {
  v1::RegionRequest request;
  request.mutable_release()->set_token(token);
  {
    const MutexLock lock(send_mutex_);
    // After a lost connection nothing can be learnt by keeping lent memory. A full socket means
    // that the server has not read hundreds of packets; wait for it, or it would keep the region. A
    // hung server may have the memory open, so that is never freed.
    int error = Send(request, MSG_DONTWAIT);
    if (IsTimeout(error)) error = Send(request, 0);
    if (error == 0 || silent_) unread_.push_back(std::move(device));
  }
  DropAnswers();
}

void SharedMemory::DropAnswers() {
  const auto many = [this] {
    const MutexLock lock(send_mutex_);
    return unread_.size() > kUnreadMost;
  };
  LetGo closed;  // destroyed without the locks
  if (many()) {
    exchange_mutex_.Lock();
  } else if (!exchange_mutex_.TryLock()) {
    return;  // the thread that holds it reads on, or the next one does
  }
  const MutexLock exchange_lock(exchange_mutex_, std::adopt_lock);
  while (DropAnswer(many() ? 0 : MSG_DONTWAIT, &closed)) {
  }
}

bool SharedMemory::DropAnswer(int flags, LetGo* closed) {
  {
    const MutexLock lock(send_mutex_);
    if (unread_.empty() || silent_) return false;
  }
  std::string packet;
  int files, file;
  const ssize_t bytes = Receive(socket_, flags, &packet, &files, &file);
  const bool lost = bytes == 0 || (bytes < 0 && !IsTimeout(errno));
  if (bytes > 0 && file >= 0) close(file);
  if (bytes < 0 && !lost) return false;
  const MutexLock lock(send_mutex_);
  if (silent_) return false;  // a concurrent send gave up
  // A RegionError that ends the connection is no reply; lent memory is closed only at end of file.
  if (!lost && unread_.front() != nullptr && !IsReleased(packet)) return true;
  do {
    closed->push_back(std::move(unread_.front()));
    unread_.pop_front();
  } while (lost && !unread_.empty());
  return true;
}

}  // namespace attend::client

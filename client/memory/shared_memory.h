// SPDX-License-Identifier: Apache-2.0
//
// Memory that the client shares with a server on its host: tensors are read from it and answers
// written to it, so that no tensor byte is copied or sent. It is either host memory, made by the
// server, or GPU memory, which is the client's and is lent (CUDA IPC). Linux.
//
// A SharedMemory is a connection to the server's socket (GetServerInfo names it). The regions made
// with it live as long as they are referenced, and keep it alive. Thread-safe.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "client/memory/device_memory.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"

namespace attend::v1 {
class RegionReply;
class RegionRequest;
}  // namespace attend::v1

namespace attend::client {

class SharedMemory;

// Where a server's socket is. Only this process's user, root and the owner of its folder are
// believed to be the server there; others are told no token and get no tensor. The owner is
// believed if the client's user has named the path, or if only root or this process's user can have
// made that folder.
struct SharedSocket {
  std::string path;
  bool named = false;
};

// Every offset in a region is a multiple of this.
inline constexpr int64_t kSharedAlignBytes = 256;
// `bytes` rounded up so that another tensor can follow.
constexpr int64_t SharedSpace(int64_t bytes) {
  return (bytes + kSharedAlignBytes - 1) / kSharedAlignBytes * kSharedAlignBytes;
}

class SharedRegion {
 public:
  // Releases the region, unless SharedMemory::Release already has. Calls that name it from then on
  // fail; requests that the server still runs continue. Does not wait for the server, because the
  // thread that drops the last reference may hold locks: the SharedMemory keeps a device's memory
  // until the server has closed it. (If the region holds the last reference to the SharedMemory,
  // see ~SharedMemory.)
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Host memory: page-aligned, initially zero. Its bytes stay until it is released, even if the
  // server takes the region away, so that calls that name it fail. Device memory: its address,
  // which the host cannot read.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Names the region in messages. Any client that has the token can make requests read and write
  // the region.
  const std::string& token() const { return token_; }
  // Null if it is host memory.
  DeviceMemory* device() const { return device_.get(); }

 private:
  friend class SharedMemory;
  SharedRegion(std::shared_ptr<SharedMemory> memory, std::string token, std::byte* data,
               int64_t bytes, std::shared_ptr<DeviceMemory> device);

  const std::shared_ptr<SharedMemory> memory_;
  const std::string token_;
  std::byte* const data_;
  const int64_t bytes_;
  const std::shared_ptr<DeviceMemory> device_;
  std::atomic<bool> released_ = false;
};

// A place in a region, which it keeps alive.
struct SharedPlace {
  std::shared_ptr<SharedRegion> region;
  int64_t offset = 0;
  std::byte* data() const { return region->data() + offset; }
};

class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // Who connects, for a server that asks: with which token, and for which tenant (empty: the
  // token's own).
  struct Caller {
    std::string token;
    std::string tenant;
  };
  // UNAVAILABLE if no server listens there, PERMISSION_DENIED if somebody else does. With a token,
  // what the server says of it. `wait`: a server that takes longer to answer, with nothing of the
  // client's to wait for, hangs. The connection is then ended: this and everything later is
  // UNAVAILABLE, and lent memory is never freed.
  static Result<std::shared_ptr<SharedMemory>> Connect(
      const SharedSocket& at, const Caller& caller = {},
      std::chrono::milliseconds wait = std::chrono::seconds(5));
  // Waits, for some seconds at most, until the server has closed all lent memory. Memory that it
  // has not closed by then is never freed.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Makes a region of at least `bytes`. The server's refusal says which of its bounds that would
  // exceed. Waits until the server has the memory (some 50 ms for 1 GiB with a GPU), for other
  // threads' Create, and for requests over memory that was lent and then released.
  Result<std::shared_ptr<SharedRegion>> Create(int64_t bytes);
  // Makes a region of the client's own memory. The region keeps that memory, and after it this
  // object does, until the server has closed it. This is noticed by the next Create, Lend or
  // Release, when the next region is destroyed, and in the destructor. The server's refusal gives
  // its reason.
  Result<std::shared_ptr<SharedRegion>> Lend(std::shared_ptr<DeviceMemory> device);
  // Releases a region of this object now, even if it is still referenced: calls that name it from
  // then on fail. Host memory stays mapped, but its bytes are gone: it reads as zeros once no
  // request uses it. OK: lent memory is closed, and every request over it has ended, including
  // cancelled ones, so the memory may be freed. Waits for that, and so does every other exchange
  // with this server meanwhile. UNAVAILABLE: the connection is lost. The server, if it lives, then
  // closes the memory too, but there is no telling when. FAILED_PRECONDITION: the region was
  // already released. After an error that the server sent the region has lent memory still, and
  // keeps it until the server has closed it.
  Status Release(SharedRegion& region);
  // Whether the connection has been ended because the server has not answered in time.
  bool silent() const;

 private:
  friend class SharedRegion;
  // Memory of released regions, in the order of their packets; null for host memory.
  using LetGo = std::deque<std::shared_ptr<DeviceMemory>>;

  explicit SharedMemory(int socket) : socket_(socket) {}
  Status Identify(const Caller& caller);
  // Releases without waiting; `device` is kept until the answer has arrived.
  void Forget(const std::string& token, std::shared_ptr<DeviceMemory> device);
  // Sends one packet. Returns 0 or errno; ETIMEDOUT if it has given up.
  int Send(const v1::RegionRequest& request, int flags) ATTEND_REQUIRES(send_mutex_);
  void GiveUp() ATTEND_REQUIRES(send_mutex_);
  // Sends one packet and receives the answer, for which it waits so many times as long as the
  // socket's calls may take; `file` receives the descriptor that came with it, or -1.
  Status Exchange(const v1::RegionRequest& request, int64_t waits, v1::RegionReply* reply,
                  int* file);
  // Reads the answers to releases that have already arrived; waits only if many are outstanding.
  void DropAnswers();
  // Reads the next answer to a release and moves the memory it is about to `closed`; all of it if
  // the connection is lost. False: no answer is there.
  bool DropAnswer(int flags, LetGo* closed) ATTEND_REQUIRES(exchange_mutex_);

  const int socket_;
  Mutex exchange_mutex_;      // held for one exchange, and while reading
  mutable Mutex send_mutex_;  // held for one packet; taken after exchange_mutex_
  // Releases that were sent and whose answers have not been read. These come before the answers to
  // later packets, and the server answers only when it has closed the lent memory.
  LetGo unread_ ATTEND_GUARDED_BY(send_mutex_);
  // The exchange under way waits however long, for requests over lent memory.
  bool patient_ ATTEND_GUARDED_BY(send_mutex_) = false;
  // The server did not answer in time: the socket is shut.
  bool silent_ ATTEND_GUARDED_BY(send_mutex_) = false;
};

}  // namespace attend::client

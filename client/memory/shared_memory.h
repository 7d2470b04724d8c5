// SPDX-License-Identifier: Apache-2.0
//
// Memory shared with a server on the same host: tensors are read from it and answers written to it,
// so no tensor byte is copied or sent. It is either host memory, made by the server, or the
// client's GPU memory, lent to the server (CUDA IPC). Linux.
//
// A SharedMemory is a connection to the server's socket (named by GetServerInfo). Its regions live
// as long as they are referenced, and keep it alive. Thread-safe.

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

// Where a server's socket is. Only processes of this process's user, root or the owner of the
// socket's folder are trusted to be the server; others receive no token and no tensor. The folder's
// owner is trusted if the client's user has named the path, or if only root or this process's user
// can have made that folder.
struct SharedSocket {
  std::string path;
  bool named = false;
};

// Every tensor's offset in a region is a multiple of this.
inline constexpr int64_t kSharedAlignBytes = 256;
// `bytes` rounded up to where the next tensor may begin.
constexpr int64_t SharedSpace(int64_t bytes) {
  return (bytes + kSharedAlignBytes - 1) / kSharedAlignBytes * kSharedAlignBytes;
}

class SharedRegion {
 public:
  // Releases the region, unless SharedMemory::Release already has. Later calls that name it fail;
  // requests in flight on the server continue. Does not wait for the server, because the thread
  // that drops the last reference may hold locks: the SharedMemory keeps device memory until the
  // server has closed it. (If the region holds the last reference to the SharedMemory, see
  // ~SharedMemory.)
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Host memory: page-aligned, initially zero. It stays mapped until the region is destroyed, even
  // if the server has withdrawn the region, in which case calls that name it fail. Device memory:
  // its address, which the host cannot read.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Identifies the region in messages. Any client that has the token can make requests read and
  // write the region.
  const std::string& token() const { return token_; }
  // Null for host memory.
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

// A place in a region; keeps the region alive.
struct SharedPlace {
  std::shared_ptr<SharedRegion> region;
  int64_t offset = 0;
  std::byte* data() const { return region->data() + offset; }
};

class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // Credentials for a server that authenticates callers: the token and the tenant (empty: the
  // token's own).
  struct Caller {
    std::string token;
    std::string tenant;
  };
  // UNAVAILABLE: no server listens there. PERMISSION_DENIED: an untrusted process does. With a
  // token, also the server's verdict on it. `wait` bounds how long the server may take to reply
  // when it is not waiting for requests over lent memory. Beyond it the connection is ended: this
  // and all later calls return UNAVAILABLE, and lent memory is never freed.
  static Result<std::shared_ptr<SharedMemory>> Connect(
      const SharedSocket& at, const Caller& caller = {},
      std::chrono::milliseconds wait = std::chrono::seconds(5));
  // Waits a bounded time (10 s per reply) until the server has closed all lent memory. Memory not
  // closed by then is never freed.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Makes a region of at least `bytes`. A refusal names the server's bound that would be exceeded.
  // Waits until the server has the memory (about 50 ms for 1 GiB with a GPU), for other threads'
  // Create, and for requests over lent memory that was released.
  Result<std::shared_ptr<SharedRegion>> Create(int64_t bytes);
  // Makes a region of the client's own memory. The region, and after it this object, keeps that
  // memory until the server has closed it. That is noticed by the next Create, Lend or Release,
  // when the next region is destroyed, and in the destructor. A refusal gives the server's reason.
  Result<std::shared_ptr<SharedRegion>> Lend(std::shared_ptr<DeviceMemory> device);
  // Releases a region of this object now, even if it is still referenced: later calls that name it
  // fail. Host memory stays mapped, but loses its contents: it reads as zeros once no request uses
  // it. OK: lent memory is closed, and every request over it has ended, cancelled ones included, so
  // the memory may be freed. Waits for that, and so does every other exchange with this server in
  // the meantime. UNAVAILABLE: the connection is lost; a live server then closes the memory too, at
  // an unknown time. FAILED_PRECONDITION: already released. After an error sent by the server the
  // region still counts as lent, and keeps the memory until the server has closed it.
  Status Release(SharedRegion& region);
  // Whether the connection was ended because the server did not reply in time.
  bool silent() const;

 private:
  friend class SharedRegion;
  // Memory of released regions, in the order of their packets; null for host memory.
  using LetGo = std::deque<std::shared_ptr<DeviceMemory>>;

  explicit SharedMemory(int socket) : socket_(socket) {}
  Status Identify(const Caller& caller);
  // Releases without waiting; `device` is kept until the reply has arrived.
  void Forget(const std::string& token, std::shared_ptr<DeviceMemory> device);
  // Sends one packet. Returns 0 or errno; ETIMEDOUT if the connection has been given up.
  int Send(const v1::RegionRequest& request, int flags) ATTEND_REQUIRES(send_mutex_);
  void GiveUp() ATTEND_REQUIRES(send_mutex_);
  // Sends one packet and receives its reply, waiting up to `waits` socket timeouts; `file` receives
  // the descriptor that came with it, or -1.
  Status Exchange(const v1::RegionRequest& request, int64_t waits, v1::RegionReply* reply,
                  int* file);
  // Reads replies to releases that have already arrived; waits only if many are outstanding.
  void DropAnswers();
  // Reads the next reply to a release and moves its memory to `closed`; all memory if the
  // connection is lost. False: no reply has arrived.
  bool DropAnswer(int flags, LetGo* closed) ATTEND_REQUIRES(exchange_mutex_);

  const int socket_;
  Mutex exchange_mutex_;      // held for one exchange, and while reading
  mutable Mutex send_mutex_;  // held for one packet; taken after exchange_mutex_
  // Releases sent whose replies have not been read, in order. They precede the replies to later
  // packets, and the server replies only once it has closed the lent memory.
  LetGo unread_ ATTEND_GUARDED_BY(send_mutex_);
  // The current exchange waits indefinitely, for requests over lent memory.
  bool patient_ ATTEND_GUARDED_BY(send_mutex_) = false;
  // The server did not reply in time; the socket is shut down.
  bool silent_ ATTEND_GUARDED_BY(send_mutex_) = false;
};

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Memory that the client shares with a server on its host: tensors lie in it and answers are
// written to it, so that no tensor byte is copied or sent. Of the host, then made by the server; or
// of a GPU, then the client's own and lent (CUDA IPC). Linux.
//
// A SharedMemory is a connection to the server's socket (GetServerInfo names it); the regions made
// with it live as long as somebody holds them, and keep it. Thread-safe.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "client/memory/device_memory.h"
#include "kernels/util/status.h"

namespace attend::v1 {
class RegionReply;
class RegionRequest;
}  // namespace attend::v1

namespace attend::client {

class SharedMemory;

// Every offset in a region is a multiple of it.
inline constexpr int64_t kSharedAlignBytes = 256;
// `bytes` rounded up so that something can follow.
constexpr int64_t SharedSpace(int64_t bytes) {
  return (bytes + kSharedAlignBytes - 1) / kSharedAlignBytes * kSharedAlignBytes;
}

class SharedRegion {
 public:
  // Releases it, unless SharedMemory::Release has: calls that name it from then on fail; what the
  // server still runs goes on. Does not wait for the server, as whoever holds the last reference
  // may hold locks too: the SharedMemory keeps a device's memory until the server has closed it.
  // (Where the region is the last to hold that as well, see its end.)
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Of the host: page-aligned, zeros at first. Of a device: its address, not to be read here.
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // What names it in messages. Whoever has it can have requests read and write the region.
  const std::string& token() const { return token_; }
  // Null: memory of the host.
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

// A place in a region, which it keeps.
struct SharedPlace {
  std::shared_ptr<SharedRegion> region;
  int64_t offset = 0;
  std::byte* data() const { return region->data() + offset; }
};

class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // UNAVAILABLE if nobody serves there.
  static Result<std::shared_ptr<SharedMemory>> Connect(const std::string& path);
  // Waits, some seconds at most, until the server has closed what was lent. What it has not closed
  // by then is never freed.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // At least `bytes`. The server's refusal says which of its bounds it would exceed. Waits until
  // the server has the memory, some 50 ms for 1 GiB with a GPU, for other threads' Create, and for
  // requests over what was lent and released before.
  Result<std::shared_ptr<SharedRegion>> Create(int64_t bytes);
  // A region of memory that the client has and that the region keeps, and then this object: until
  // the server has closed it, which is found out by the next call of Create, Lend or Release, by
  // the next region that goes, and in the end. The server's refusal says why it does not take it.
  Result<std::shared_ptr<SharedRegion>> Lend(std::shared_ptr<DeviceMemory> device);
  // Releases a region of this object now, whoever holds it: calls that name it from then on fail.
  // OK: what was lent is closed, and every request over it has ended, the cancelled ones too, so
  // that the memory may be freed. Waits for that, as does all else that asks this server meanwhile.
  // UNAVAILABLE: the connection is lost. The server, if it lives, then closes the memory too, but
  // nobody can tell when. FAILED_PRECONDITION: it was released before.
  Status Release(SharedRegion& region);

 private:
  friend class SharedRegion;
  // What releases have let go of, in the order of their packets; null for the host's memory.
  using LetGo = std::deque<std::shared_ptr<DeviceMemory>>;

  explicit SharedMemory(int socket) : socket_(socket) {}
  // Releases without waiting; `device` is kept until the answer has come.
  void Forget(const std::string& token, std::shared_ptr<DeviceMemory> device);
  // One packet, with send_mutex_ held; 0 or errno.
  int Send(const v1::RegionRequest& request, int flags);
  // One packet there and back; `file` receives the descriptor that came along, or -1.
  Status Exchange(const v1::RegionRequest& request, v1::RegionReply* reply, int* file);
  // Reads the answers to releases that are there already, and waits only where many are not.
  void DropAnswers();
  // The next answer to a release: what it tells of. All of them if the connection is lost. False:
  // none is there.
  bool DropAnswer(int flags, LetGo* closed);

  const int socket_;
  std::mutex exchange_mutex_;  // held for one exchange, and by whoever reads
  std::mutex send_mutex_;      // held for one packet; behind the other one
  // Of the releases sent whose answers nobody has read: they come before those to later packets,
  // and the server answers only when it has closed what was lent.
  LetGo unread_;
};

}  // namespace attend::client

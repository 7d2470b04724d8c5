// SPDX-License-Identifier: Apache-2.0
//
// What the machine's TCP carries without gRPC: messages over several connections, in chunks, each
// byte received into warm memory and touched there, an acknowledgement for each message.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/service/rounds.h"

namespace attend::bench {

inline constexpr int64_t kRawChunkBytes = int64_t{1} << 20;

// The first word of each 64 bytes of a message, added up: what touching it comes to, and how both
// sides know that the same bytes left and arrived. A last part of less than 8 bytes counts nothing.
uint64_t TouchBytes(const std::byte* data, int64_t bytes);

// Serves until it is destroyed, one thread a connection.
class RawTcpServer {
 public:
  static Result<std::unique_ptr<RawTcpServer>> Start();
  ~RawTcpServer();
  const std::string& address() const { return address_; }
  int64_t bytes_received() const { return bytes_received_; }

 private:
  explicit RawTcpServer(int listener) : listener_(listener) {}
  void Accept();
  void Serve(int socket);

  const int listener_;
  std::string address_;
  std::atomic<int64_t> bytes_received_ = 0;
  std::mutex mutex_;
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
  std::thread acceptor_;
};

struct RawTcpLoad {
  int64_t up_bytes = 0;    // of a message
  int64_t down_bytes = 0;  // of the answer to it
  int connections = 1;
  // Messages of a connection that are unacknowledged at once; more than one only where nothing
  // comes down.
  int in_flight = 1;
  // One message at a time, its bytes and its answer's split over the connections, all bytes up
  // before the first one down. Else each connection carries messages of its own.
  bool together = false;
  int64_t chunk_bytes = kRawChunkBytes;
};

// Connections that stay open between drives.
class RawTcpClient {
 public:
  static Result<std::unique_ptr<RawTcpClient>> Connect(const std::string& address,
                                                       const RawTcpLoad& load);
  ~RawTcpClient();
  // For `seconds`, at least one message a connection. Wrong acknowledgements are the error.
  Result<Sample> Drive(double seconds);

 private:
  struct Round;
  explicit RawTcpClient(const RawTcpLoad& load);
  Status CarryOwn(size_t connection, Round& round);
  Status CarryTogether(size_t connection, Round& round);
  Status SendUp(size_t connection);
  Status TakeAcknowledgement(size_t connection);
  Status TakeDown(size_t connection);

  const RawTcpLoad load_;
  std::vector<std::byte> message_;
  // Of the message, by connection.
  struct Part {
    int socket = -1;
    int64_t offset = 0;
    int64_t up_bytes = 0;
    int64_t down_bytes = 0;
    uint64_t sum = 0;
    std::vector<std::byte> chunk;  // where its answers arrive
  };
  std::vector<Part> parts_;
};

}  // namespace attend::bench

// SPDX-License-Identifier: Apache-2.0
//
// The throughput of the machine's TCP without gRPC: messages over several connections, in chunks
// that are received into warm memory and read there, with an acknowledgement for each message.

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

// The sum of the first word of each 64 bytes of a message. It reads every cache line, and shows
// both sides that the bytes have arrived. A last part of less than 8 bytes does not count.
uint64_t TouchBytes(const std::byte* data, int64_t bytes);

// Serves until destroyed, with a thread per connection.
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
  int64_t down_bytes = 0;  // of its answer
  int connections = 1;
  // Unacknowledged messages per connection; more than one only without answers.
  int in_flight = 1;
  // One message at a time, split over the connections like its answer, which starts after all bytes
  // of the message. Otherwise each connection carries whole messages.
  bool together = false;
  int64_t chunk_bytes = kRawChunkBytes;
};

// Connections that stay open between drives.
class RawTcpClient {
 public:
  static Result<std::unique_ptr<RawTcpClient>> Connect(const std::string& address,
                                                       const RawTcpLoad& load);
  ~RawTcpClient();
  // Sends for `seconds`, at least one message per connection. Wrong acknowledgements are errors.
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
  // A connection's part of the message.
  struct Part {
    int socket = -1;
    int64_t offset = 0;
    int64_t up_bytes = 0;
    int64_t down_bytes = 0;
    uint64_t sum = 0;
    std::vector<std::byte> chunk;  // receives its answers
  };
  std::vector<Part> parts_;
};

}  // namespace attend::bench

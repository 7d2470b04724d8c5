// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/raw_tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kTouchedEveryBytes = 64;
constexpr char kGo = 'g';  // requests the bytes of the answer

// Precedes a message.
struct Header {
  int64_t up_bytes;
  int64_t down_bytes;
  int64_t chunk_bytes;
};
// Follows it.
struct Acknowledgement {
  int64_t bytes;
  uint64_t sum;
};

bool SendAll(int socket, const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, at, static_cast<size_t>(bytes), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= sent;
  }
  return true;
}

bool ReceiveAll(int socket, void* data, int64_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(socket, at, static_cast<size_t>(bytes), MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= got;
  }
  return true;
}

// Sends in chunks. ReceiveChunks receives all of them into the same memory.
bool SendChunks(int socket, const std::byte* data, int64_t bytes, int64_t chunk_bytes) {
  for (int64_t at = 0; at < bytes; at += chunk_bytes) {
    if (!SendAll(socket, data + at, std::min(chunk_bytes, bytes - at))) return false;
  }
  return true;
}

bool ReceiveChunks(int socket, int64_t bytes, std::vector<std::byte>& chunk, uint64_t* sum) {
  const int64_t chunk_bytes = static_cast<int64_t>(chunk.size());
  for (int64_t at = 0; at < bytes; at += chunk_bytes) {
    const int64_t part = std::min(chunk_bytes, bytes - at);
    if (!ReceiveAll(socket, chunk.data(), part)) return false;
    *sum += TouchBytes(chunk.data(), part);
  }
  return true;
}

// Sends the chunk repeatedly, once the client requests it.
bool SendDown(int socket, int64_t bytes, const std::vector<std::byte>& chunk) {
  char go = 0;
  if (!ReceiveAll(socket, &go, sizeof(go)) || go != kGo) return false;
  const int64_t chunk_bytes = static_cast<int64_t>(chunk.size());
  for (int64_t at = 0; at < bytes; at += chunk_bytes) {
    if (!SendAll(socket, chunk.data(), std::min(chunk_bytes, bytes - at))) return false;
  }
  return true;
}

void SetNoDelay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

Status SystemError(const char* what) {
  return Unavailable(std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

uint64_t TouchBytes(const std::byte* data, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t at = 0; at + static_cast<int64_t>(sizeof(sum)) <= bytes; at += kTouchedEveryBytes) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, sizeof(word));
    sum += word;
  }
  return sum;
}

Result<std::unique_ptr<RawTcpServer>> RawTcpServer::Start() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) return SystemError("socket");
  std::unique_ptr<RawTcpServer> server(new RawTcpServer(listener));
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, size) != 0 || listen(listener, 128) != 0 ||
      getsockname(listener, generic, &size) != 0) {
    return SystemError("a raw TCP server");
  }
  server->address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  server->acceptor_ = std::thread([raw = server.get()] { raw->Accept(); });
  return server;
}

RawTcpServer::~RawTcpServer() {
  shutdown(listener_, SHUT_RDWR);
  if (acceptor_.joinable()) acceptor_.join();
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  for (std::thread& thread : threads_) thread.join();
  for (const int socket : sockets_) close(socket);
  close(listener_);
}

void RawTcpServer::Accept() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0 && errno == EINTR) continue;
    if (socket < 0) return;
    SetNoDelay(socket);
    const std::lock_guard lock(mutex_);
    sockets_.push_back(socket);
    threads_.emplace_back([this, socket] { Serve(socket); });
  }
}

void RawTcpServer::Serve(int socket) {
  std::vector<std::byte> chunk;
  for (Header header; ReceiveAll(socket, &header, sizeof(header));) {
    if (header.chunk_bytes <= 0 || header.chunk_bytes > (int64_t{64} << 20)) break;
    chunk.resize(static_cast<size_t>(header.chunk_bytes));
    Acknowledgement acknowledgement{header.up_bytes, 0};
    if (!ReceiveChunks(socket, header.up_bytes, chunk, &acknowledgement.sum)) break;
    bytes_received_ += header.up_bytes;
    if (!SendAll(socket, &acknowledgement, sizeof(acknowledgement))) break;
    if (header.down_bytes > 0 && !SendDown(socket, header.down_bytes, chunk)) break;
  }
  // The client sees the end at once; the destructor closes the socket.
  shutdown(socket, SHUT_RDWR);
}

// Shared by the connections of a drive.
struct RawTcpClient::Round {
  // Runs while all connections wait at the barrier, so that they all see the same values.
  struct Step {
    Round* round;
    void operator()() noexcept {
      round->broken = round->failed;
      round->over = round->broken || Clock::now() >= round->end;
    }
  };

  Round(Clock::time_point end, size_t connections)
      : end(end), all(static_cast<std::ptrdiff_t>(connections), Step{this}) {}

  const Clock::time_point end;
  std::atomic<int64_t> messages = 0;
  std::atomic<bool> failed = false;
  bool broken = false;  // this and `over` change only in Step
  bool over = false;
  std::barrier<Step> all;
};

RawTcpClient::RawTcpClient(const RawTcpLoad& load)
    : load_(load), message_(static_cast<size_t>(load.up_bytes)) {
  uint64_t random = 0x9E3779B97F4A7C15u;
  for (size_t at = 0; at + sizeof(random) <= message_.size(); at += sizeof(random)) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(message_.data() + at, &random, sizeof(random));
  }
}

Result<std::unique_ptr<RawTcpClient>> RawTcpClient::Connect(const std::string& address,
                                                            const RawTcpLoad& load) {
  if (load.connections < 1 || load.chunk_bytes < 1 || load.in_flight < 1 || load.up_bytes < 0 ||
      (load.in_flight > 1 && (load.down_bytes > 0 || load.together))) {
    return InvalidArgument("raw TCP does not support this load");
  }
  std::unique_ptr<RawTcpClient> client(new RawTcpClient(load));
  const sockaddr_in to = Loopback(std::stoi(address.substr(address.rfind(':') + 1)));
  const int64_t shares = load.together ? load.connections : 1;
  for (int i = 0; i < load.connections; ++i) {
    Part& part = client->parts_.emplace_back();
    const int64_t share = load.together ? i : 0;
    part.offset = load.up_bytes * share / shares;
    part.up_bytes = load.up_bytes * (share + 1) / shares - part.offset;
    part.down_bytes = load.down_bytes * (share + 1) / shares - load.down_bytes * share / shares;
    part.chunk.resize(static_cast<size_t>(load.chunk_bytes));
    for (int64_t at = 0; at < part.up_bytes; at += load.chunk_bytes) {
      part.sum += TouchBytes(client->message_.data() + part.offset + at,
                             std::min(load.chunk_bytes, part.up_bytes - at));
    }
    part.socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (part.socket < 0 ||
        connect(part.socket, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
      return SystemError("connect");
    }
    SetNoDelay(part.socket);
  }
  return client;
}

RawTcpClient::~RawTcpClient() {
  for (const Part& part : parts_) {
    if (part.socket >= 0) close(part.socket);
  }
}

Status RawTcpClient::SendUp(size_t connection) {
  const Part& part = parts_[connection];
  const Header header{part.up_bytes, part.down_bytes, load_.chunk_bytes};
  const bool sent =
      SendAll(part.socket, &header, sizeof(header)) &&
      SendChunks(part.socket, message_.data() + part.offset, part.up_bytes, load_.chunk_bytes);
  return sent ? Status() : SystemError("send");
}

Status RawTcpClient::TakeAcknowledgement(size_t connection) {
  const Part& part = parts_[connection];
  Acknowledgement got{};
  if (!ReceiveAll(part.socket, &got, sizeof(got))) return SystemError("receive");
  const bool right = got.bytes == part.up_bytes && got.sum == part.sum;
  return right ? Status() : Internal("the bytes received differ from those sent");
}

Status RawTcpClient::TakeDown(size_t connection) {
  Part& part = parts_[connection];
  if (part.down_bytes == 0) return Status();
  uint64_t sum = 0;
  const bool taken = SendAll(part.socket, &kGo, sizeof(kGo)) &&
                     ReceiveChunks(part.socket, part.down_bytes, part.chunk, &sum);
  return taken ? Status() : SystemError("receive");
}

Status RawTcpClient::CarryOwn(size_t connection, Round& round) {
  bool any = false;
  for (int ahead = 0;;) {
    const bool enough = any && Clock::now() >= round.end;
    if (enough && ahead == 0) return Status();
    if (!enough) {
      ATTEND_RETURN_IF_ERROR(SendUp(connection));
      any = true;
      if (++ahead < load_.in_flight) continue;
    }
    ATTEND_RETURN_IF_ERROR(TakeAcknowledgement(connection));
    ATTEND_RETURN_IF_ERROR(TakeDown(connection));
    --ahead;
    ++round.messages;
  }
}

Status RawTcpClient::CarryTogether(size_t connection, Round& round) {
  while (!round.over) {
    Status status = SendUp(connection);
    if (status.ok()) status = TakeAcknowledgement(connection);
    if (!status.ok()) round.failed = true;
    round.all.arrive_and_wait();
    if (round.broken) return status;
    status = TakeDown(connection);
    if (!status.ok()) round.failed = true;
    round.all.arrive_and_wait();
    if (round.broken) return status;
    if (connection == 0) ++round.messages;
  }
  return Status();
}

Result<Sample> RawTcpClient::Drive(double seconds) {
  const Clock::time_point begin = Clock::now();
  Round round(
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)),
      parts_.size());
  std::vector<Status> statuses(parts_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts_.size(); ++i) {
    threads.emplace_back(
        [&, i] { statuses[i] = load_.together ? CarryTogether(i, round) : CarryOwn(i, round); });
  }
  for (std::thread& thread : threads) thread.join();
  Sample sample;
  sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  sample.calls = round.messages;
  sample.bytes = sample.calls * (load_.up_bytes + load_.down_bytes);
  return sample;
}

}  // namespace attend::bench

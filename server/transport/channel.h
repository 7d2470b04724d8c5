// SPDX-License-Identifier: Apache-2.0
//
// Moves a connection's bytes between its socket and its session, in plaintext or through TLS. Used
// by one thread at a time. Nothing blocks.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/limits/connection_holds.h"
#include "server/transport/output_queue.h"
#include "server/util/unique_fd.h"

namespace attend {

// The client of a connection, as known from the connection itself.
struct ConnectionPeer {
  std::string address;     // as gRPC writes peers: ipv4:127.0.0.1:1234
  bool local = false;      // on this host: loopback or a Unix socket
  bool encrypted = false;  // by TLS
  // The tenant that its Unix socket is bound to.
  std::optional<int> tenant = {};
  ConnectionHolds::Ref holds = {};  // null: the connection is not counted
  // The client presented a certificate, which was verified and has these names.
  bool certified = false;
  std::vector<std::string> uris = {}, dns_names = {}, common_names = {};
};

class Channel {
 public:
  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  int socket() const { return socket_.get(); }
  // As measured by TCP; 0 for other sockets.
  int64_t round_trip_us() const;

  // Reads received bytes into `buffer`. Returns their number; 0: the peer has closed; -1: see
  // errno, EAGAIN if nothing has arrived. Never leaves received bytes buffered where epoll would
  // not report them. `scratch` is used during the call only.
  virtual ssize_t Read(std::span<char> buffer, std::span<char> scratch) = 0;
  // Bytes pass through unchanged, so ReadTo may be called.
  virtual bool is_plain() const { return false; }
  // Like Read, but fills `place` before `buffer`.
  virtual ssize_t ReadTo(std::span<char> /*place*/, std::span<char> /*buffer*/) { return 0; }
  // Sends from the front of `output`, which is empty only if wants_write(). Returns the number of
  // bytes sent, which the caller consumes; -1: see errno, EAGAIN if the socket is full. Unsent
  // bytes must still be there at the next call.
  virtual ssize_t Write(const OutputQueue& output, std::span<char> scratch) = 0;
  // The channel has bytes of its own that the socket has not accepted yet.
  virtual bool wants_write() const { return false; }
  // Whether its client may still be served; if not, the connection ends. Cheap.
  virtual bool IsTrusted() { return true; }
  // Announces the end of the stream before an orderly close.
  virtual void End() {}
  // The last read contained the peer's announcement that it sends no more.
  virtual bool ended() const { return false; }
  // The protocol violation of the peer; empty: none.
  const std::string& wrong() const { return wrong_; }

 protected:
  std::string wrong_;

 private:
  const UniqueFd socket_;
};

class PlainChannel final : public Channel {
 public:
  using Channel::Channel;

  bool is_plain() const override { return true; }
  ssize_t ReadTo(std::span<char> place, std::span<char> buffer) override;
  ssize_t Read(std::span<char> buffer, std::span<char> scratch) override;
  ssize_t Write(const OutputQueue& output, std::span<char> scratch) override;
};

}  // namespace attend

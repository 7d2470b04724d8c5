// SPDX-License-Identifier: Apache-2.0
//
// The way of a connection's bytes between its socket and its session: as they are, or through TLS.
// Belongs to one thread at a time. None of it blocks.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/transport/output_queue.h"
#include "server/util/unique_fd.h"

namespace attend {

// The client of a connection, as far as the connection itself tells.
struct ConnectionPeer {
  std::string address;     // in the form of gRPC's peers: ipv4:127.0.0.1:1234
  bool encrypted = false;  // by TLS
  // It has shown a certificate, which was verified and has these names.
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

  // Takes what has come, which lies in `buffer` then. Returns how many bytes that are; 0: the peer
  // has ended; -1: errno says why, EAGAIN if nothing has come. Nothing that has come stays behind
  // where the socket's events would not tell of it. `scratch`: for the time of the call.
  virtual ssize_t Read(std::span<char> buffer, std::span<char> scratch) = 0;
  // Bytes pass through the channel as they are, so that ReadTo may be called.
  virtual bool is_plain() const { return false; }
  // As Read, but what has come fills `place` before `buffer`.
  virtual ssize_t ReadTo(std::span<char> /*place*/, std::span<char> /*buffer*/) { return 0; }
  // Sends from the front of `output`, which is not empty, unless wants_write(). Returns how many of
  // its bytes have left and are the caller's to consume; -1: errno says why, EAGAIN if the socket
  // takes no more. What has not left must be there the next time.
  virtual ssize_t Write(const OutputQueue& output, std::span<char> scratch) = 0;
  // The channel has bytes of its own to send, which the socket has not taken so far.
  virtual bool wants_write() const { return false; }
  // Says that no more will come, before the socket is closed in good order.
  virtual void End() {}
  // The peer has said that it sends no more, in what was read last.
  virtual bool ended() const { return false; }
  // For what the peer did that it may not; empty: nothing.
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

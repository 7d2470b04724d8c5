// SPDX-License-Identifier: Apache-2.0
//
// Performs the handshakes of new TLS connections on its own thread, so that no loop of the
// transport waits for private-key operations. Peers take turns: however many handshakes a peer
// begins, another peer's client waits for at most one step of them before each of its own.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/loop.h"
#include "server/transport/tls_channel.h"

namespace attend {

class TlsHandshakes {
 public:
  // Returns the channel. If the handshake failed because of the client, wrong() says why. Called
  // once, on the thread; must not throw.
  using Done = std::function<void(std::unique_ptr<TlsChannel> channel, bool established)>;

  // `clock` must outlive it. `speaks_tls` is asked on the thread about each socket with its first
  // bytes, which stay unread; if not, the handshake fails.
  static Result<std::unique_ptr<TlsHandshakes>> Start(
      Duration timeout, const Clock& clock,
      std::function<bool(int socket)> speaks_tls = [](int) { return true; });
  ~TlsHandshakes();  // pending handshakes fail
  TlsHandshakes(const TlsHandshakes&) = delete;
  TlsHandshakes& operator=(const TlsHandshakes&) = delete;

  // `peer`: the key by which connections are counted. Any thread. If it throws std::bad_alloc,
  // `done` is not called.
  void Begin(std::string peer, std::unique_ptr<TlsChannel> channel, Done done);

 private:
  class Handshake;
  // A peer with pending handshakes.
  struct Peer {
    int64_t handshakes = 0;
    uint64_t next_turn = 0;  // of the next handshake that becomes ready
  };
  class Turn final : public Loop::Task {
   public:
    explicit Turn(TlsHandshakes& all) : all_(all) {}
    void Run() override { all_.TakeTurn(); }

   private:
    TlsHandshakes& all_;
  };

  TlsHandshakes(Duration timeout, const Clock& clock, std::function<bool(int)> speaks_tls)
      : timeout_(timeout), clock_(clock), speaks_tls_(std::move(speaks_tls)) {}
  // Performs one step of one handshake, of the peer that has waited longest.
  void TakeTurn();

  const Duration timeout_;
  const Clock& clock_;
  const std::function<bool(int)> speaks_tls_;
  // Used by the thread only.
  std::map<std::string, Peer> peers_;
  std::set<Handshake*> handshakes_;            // all that have started
  std::multimap<uint64_t, Handshake*> ready_;  // by turn
  uint64_t turns_ = 0;                         // the newest one taken
  Turn turn_{*this};
  std::unique_ptr<Loop> loop_;
};

}  // namespace attend

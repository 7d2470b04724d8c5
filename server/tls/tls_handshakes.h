// SPDX-License-Identifier: Apache-2.0
//
// Performs the handshakes of new TLS connections on its own thread, so that no loop of the
// transport waits for private-key operations. Peers take turns: however many handshakes a peer
// begins, another peer's client waits for at most one step of them before each of its own.

#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

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

  // `clock` must outlive it.
  static Result<std::unique_ptr<TlsHandshakes>> Start(Duration timeout, const Clock& clock);
  ~TlsHandshakes();  // pending handshakes fail
  TlsHandshakes(const TlsHandshakes&) = delete;
  TlsHandshakes& operator=(const TlsHandshakes&) = delete;

  // `peer`: the key by which connections are counted. Any thread. If it throws std::bad_alloc,
  // `done` is not called.
  void Begin(std::string peer, std::unique_ptr<TlsChannel> channel, Done done);

 private:
  class Handshake;
  // A peer with pending handshakes. List nodes are spliced between lists, which allocates nothing.
  struct Peer {
    Peer() = default;
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    std::list<Handshake*> waiting;  // waiting for their clients
    std::list<Handshake*> ready;    // waiting for the peer's turn
    std::list<Peer*> link{this};    // its node while it is not in turns_
    const std::list<Peer*>::iterator place = link.begin();
  };
  class Turn final : public Loop::Task {
   public:
    explicit Turn(TlsHandshakes& all) : all_(all) {}
    void Run() override { all_.TakeTurn(); }

   private:
    TlsHandshakes& all_;
  };

  TlsHandshakes(Duration timeout, const Clock& clock) : timeout_(timeout), clock_(clock) {}
  // Performs one step of one handshake, of the peer that has waited longest.
  void TakeTurn();

  const Duration timeout_;
  const Clock& clock_;
  // Used by the thread only.
  std::unordered_map<std::string, Peer> peers_;
  std::list<Peer*> turns_;  // peers with ready handshakes
  Turn turn_{*this};
  std::unique_ptr<Loop> loop_;
};

}  // namespace attend

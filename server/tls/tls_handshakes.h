// SPDX-License-Identifier: Apache-2.0
//
// Performs the handshakes of new TLS connections on a thread of its own, so that no loop of the
// transport waits for the work of a private key. Peers take turns on it: however many handshakes a
// peer begins, a client elsewhere waits for one step of one of them before each of its own.

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
  // Takes the channel back. If the handshake failed, wrong() says what the client did, if that was
  // why. Called once, on the thread; may not throw.
  using Done = std::function<void(std::unique_ptr<TlsChannel> channel, bool established)>;

  // `clock` must outlive it.
  static Result<std::unique_ptr<TlsHandshakes>> Start(Duration timeout, const Clock& clock);
  ~TlsHandshakes();  // those that are under way fail
  TlsHandshakes(const TlsHandshakes&) = delete;
  TlsHandshakes& operator=(const TlsHandshakes&) = delete;

  // `peer`: as connections are counted by. Any thread. May throw std::bad_alloc, and has then not
  // called `done`.
  void Begin(std::string peer, std::unique_ptr<TlsChannel> channel, Done done);

 private:
  class Handshake;
  // With handshakes under way. A list's element moves between lists and takes no memory for it.
  struct Peer {
    Peer() = default;
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    std::list<Handshake*> waiting;  // for their clients
    std::list<Handshake*> ready;    // for the peer's turns
    std::list<Peer*> link{this};    // its element of turns_, while it is not there
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
  // One step of one handshake, of the peer that has waited for longest.
  void TakeTurn();

  const Duration timeout_;
  const Clock& clock_;
  // The thread's.
  std::unordered_map<std::string, Peer> peers_;
  std::list<Peer*> turns_;  // those with handshakes that are ready
  Turn turn_{*this};
  std::unique_ptr<Loop> loop_;
};

}  // namespace attend

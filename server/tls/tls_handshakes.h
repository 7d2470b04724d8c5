// SPDX-License-Identifier: Apache-2.0
//
// Shakes hands with the clients of new TLS connections on a thread of its own, so that no loop of
// the transport waits for a private key's work.

#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/loop.h"
#include "server/transport/tls_channel.h"

namespace attend {

class TlsHandshakes {
 public:
  // The channel is the callee's; if hands are not shaken, its wrong() says what the client did, if
  // it was that. Called once, on the thread; may not throw.
  using Done = std::function<void(std::unique_ptr<TlsChannel> channel, bool shaken)>;

  // `clock` must outlive it.
  static Result<std::unique_ptr<TlsHandshakes>> Start(Duration timeout, const Clock& clock);
  ~TlsHandshakes();  // those that are under way fail
  TlsHandshakes(const TlsHandshakes&) = delete;
  TlsHandshakes& operator=(const TlsHandshakes&) = delete;

  // Any thread. May throw std::bad_alloc, and has then not called `done`.
  void Begin(std::unique_ptr<TlsChannel> channel, Done done);

 private:
  class One;
  class EndAll;

  TlsHandshakes(Duration timeout, const Clock& clock) : timeout_(timeout), clock_(clock) {}

  const Duration timeout_;
  const Clock& clock_;
  One* first_ = nullptr;  // a list of those under way; the thread's
  std::unique_ptr<Loop> loop_;
};

}  // namespace attend

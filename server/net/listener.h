// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for gRPC, whose own listener forgets its sockets for good at the first error.
// One thread for all addresses. A connection is kept here until its first byte has come; there is a
// bound on connections in all and for each peer, and where it is reached the one that has said
// nothing for longest makes room. Errors of the system are survived: it rests and tries again.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/net/connection_limits.h"
#include "server/net/connection_table.h"
#include "server/util/clock.h"
#include "server/util/unique_fd.h"

namespace attend {

class Listener {
 public:
  struct Options {
    ConnectionLimits limits;
    Duration first_byte_timeout;
  };
  struct Callbacks {
    // Takes over a connected, non-blocking socket that has something to read. On the thread.
    std::function<void(int socket)> take;
    // Accepting has failed for a while, or works again. On the thread, which holds no lock.
    std::function<void(bool accepting)> changed;
  };

  // Accepts from `sockets`, which listen already and outlive the listener, from now on.
  static Result<std::unique_ptr<Listener>> Start(const Options& options, std::vector<int> sockets,
                                                 Callbacks callbacks, Metrics& metrics,
                                                 Logger& logger, const Clock& clock);
  ~Listener();  // ends what is still silent
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Connections that are open now. From any thread.
  int64_t CountOpen();
  bool accepting() const { return accepting_.load(std::memory_order_acquire); }

 private:
  Listener(const Options& options, std::vector<int> sockets, Callbacks callbacks, Metrics& metrics,
           Logger& logger, const Clock& clock);
  void Run();
  void Serve(const std::vector<int>& ready);
  int WaitMs() const;
  bool IsListener(int fd) const;
  bool Watch(int operation, int fd, bool readable);
  void Accept(int listener);
  void AcceptFailed(int listener);
  // Accepts and closes with the spare descriptor, so that clients learn of it.
  void Shed(int listener);
  void Rest(bool rest);
  void SetAccepting(bool accepting);

  void Admit(UniqueFd socket);
  bool MakeRoom(int socket, const std::string& peer);
  void SweepOften();
  // Hands over what speaks and closes what has ended. True if it is still there and silent.
  bool IsSilent(int fd);
  void Close(int fd);
  void EndSilent();
  void CountRefused(int socket, ConnectionRefusal reason);

  const Options options_;
  const std::vector<int> sockets_;
  const Callbacks callbacks_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  UniqueFd events_;  // epoll
  UniqueFd wake_;    // readable once the thread shall end
  UniqueFd spare_;
  std::mutex mutex_;
  ConnectionTable table_;  // the thread's, but for CountOpen
  TimePoint swept_{};      // the thread's, as what follows
  bool resting_ = false;   // the listeners are not looked at
  TimePoint rest_until_{};
  std::optional<TimePoint> failing_since_;
  std::atomic<bool> accepting_{true};
  std::thread thread_;
};

// Who counts as one peer: an IPv4 address, the /64 network of an IPv6 address, or a user on this
// host.
std::string PeerOf(int socket);
// The same in words: of an IPv6 address the network.
std::string PeerText(int socket);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The server's end of the wire: loops and the connections they serve.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/transport/channel.h"
#include "server/transport/connection.h"
#include "server/transport/loop.h"
#include "server/transport/server_call.h"

namespace attend {

// Thread-safe, except for destruction.
class Http2Transport {
 public:
  struct Options {
    int loops = 1;
    size_t read_bytes_max = size_t{256} << 10;
    ConnectionOptions connection;
    // Large messages are read into these. Must outlive the messages and the transport. Null: heap
    // blocks.
    BlockPool* blocks = nullptr;
  };

  // `methods` and `clock` must outlive the transport.
  static Result<std::unique_ptr<Http2Transport>> Start(const Options& options, CallMethods& methods,
                                                       const Clock& clock);
  // Closes every connection, which cancels its calls, and waits until all calls are done.
  ~Http2Transport();
  Http2Transport(const Http2Transport&) = delete;
  Http2Transport& operator=(const Http2Transport&) = delete;

  // Serves a connected, non-blocking socket on the loop with the fewest connections. `peer`
  // describes the client to calls. `guard` may be null. May throw std::bad_alloc.
  void Serve(std::unique_ptr<Channel> channel, ConnectionPeer peer,
             std::unique_ptr<ConnectionGuard> guard);
  // Asks the clients of all current connections to open no more calls. A connection closes once the
  // calls on it that were already on their way are done.
  void Drain();
  // Ends connections whose clients are not trusted any more.
  void Recheck();

  int64_t CountConnections() const;
  int64_t CountCalls() const { return calls_.load(); }
  // The peers of connections with responses that their clients have not taken.
  std::vector<std::string> WaitingPeers() const;
  // The longest time that a loop has been unresponsive: since a probe posted by an earlier call
  // that it has not run yet. Each call posts new probes to the responsive loops.
  Duration StoodStill() ATTEND_EXCLUDES(mutex_);

 private:
  // A loop, and tasks for all of its connections.
  struct Part;

  explicit Http2Transport(const Clock& clock);

  const Clock& clock_;
  Mutex mutex_;  // guards the probes of StoodStill
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> busy_{0};  // connections with large messages
  BlockPool heap_{0};
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace attend

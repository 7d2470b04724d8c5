// SPDX-License-Identifier: Apache-2.0
//
// The server's end of the wire: loops, and the connections that they serve.

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

// Thread-safe, but for its end.
class Http2Transport {
 public:
  struct Options {
    int loops = 1;
    size_t read_bytes_max = size_t{256} << 10;
    ConnectionOptions connection;
    // Into which large messages are read. Must outlive them and the transport. Null: the heap's.
    BlockPool* blocks = nullptr;
  };

  // `methods` and `clock` must outlive the transport.
  static Result<std::unique_ptr<Http2Transport>> Start(const Options& options, CallMethods& methods,
                                                       const Clock& clock);
  // Closes every connection, which cancels its calls, and waits until all calls are done.
  ~Http2Transport();
  Http2Transport(const Http2Transport&) = delete;
  Http2Transport& operator=(const Http2Transport&) = delete;

  // Serves a connected, non-blocking socket, on the loop that has fewest. `peer`: what calls learn
  // of the client. `guard`: null for none. May throw std::bad_alloc.
  void Serve(std::unique_ptr<Channel> channel, ConnectionPeer peer,
             std::unique_ptr<ConnectionGuard> guard);
  // Asks the clients of all connections that there are to open no more calls on them. The
  // connections close once the calls are done that clients have begun before they knew.
  void Drain();

  int64_t CountConnections() const;
  int64_t CountCalls() const { return calls_.load(); }
  // Bytes that came as padding, which is legal and carries nothing.
  int64_t CountPadding() const;
  // For how long a loop has not answered to an earlier call of this: of the one that has not for
  // longest. Each call asks those again that have.
  Duration StoodStill() ATTEND_EXCLUDES(mutex_);

 private:
  // One loop, and what is done to all of its connections.
  struct Part;

  explicit Http2Transport(const Clock& clock);

  const Clock& clock_;
  Mutex mutex_;  // of StoodStill
  std::atomic<int64_t> calls_{0};
  BlockPool heap_{0};
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace attend

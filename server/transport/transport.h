// SPDX-License-Identifier: Apache-2.0
//
// The server's end of the wire: loops, and the connections that they serve.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/transport/connection.h"
#include "server/transport/loop.h"
#include "server/transport/server_call.h"
#include "server/util/unique_fd.h"

namespace attend {

// Thread-safe, but for its end.
class Transport {
 public:
  struct Options {
    int loops = 1;
    size_t read_bytes_max = size_t{256} << 10;
    ConnectionOptions connection;
  };

  // `methods` and `clock` must outlive the transport.
  static Result<std::unique_ptr<Transport>> Start(const Options& options, CallMethods& methods,
                                                  const Clock& clock);
  // Closes every connection, which cancels its calls, and waits until all calls are done.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  // Serves a connected, non-blocking socket, on the loop that has fewest. `peer`: how calls name
  // it. `guard`: null for none. May throw std::bad_alloc.
  void Serve(UniqueFd socket, std::string peer, std::unique_ptr<ConnectionGuard> guard);
  // Asks the clients of all connections that there are to open no more calls on them. The
  // connections close once the calls are done that clients have begun before they knew.
  void Drain();

  int64_t CountConnections() const;
  int64_t CountCalls() const { return calls_.load(); }
  // Bytes that came as padding, which is legal and carries nothing.
  int64_t CountPadding() const;
  // When the loop that has stood still for longest last did something; loops with nothing to do
  // are asked first, and answer in the next turn.
  TimePoint LookedAt();

 private:
  // One loop, and what is done to all of its connections.
  struct Part;

  Transport() = default;

  std::atomic<int64_t> calls_{0};
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace attend

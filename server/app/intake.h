// SPDX-License-Identifier: Apache-2.0
//
// The way of an accepted connection into the transport: with TLS or without, counted either way.

#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/app/h2_guard.h"
#include "server/limits/connection_holds.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/net/message_memory.h"
#include "server/net/open_calls.h"
#include "server/net/open_sockets.h"
#include "server/tls/tls_certificates.h"
#include "server/tls/tls_clients.h"
#include "server/tls/tls_handshakes.h"
#include "server/transport/http2_transport.h"
#include "server/transport/tls_channel.h"
#include "server/util/unique_fd.h"

namespace attend {

class Intake {
 public:
  // Reads the files of --tls-cert and so on, if there are any. The references but `config` must
  // outlive the object.
  static Result<std::unique_ptr<Intake>> Make(const Config& config, ConnectionHolds& connections,
                                              Metrics& metrics, Logger& logger, const Clock& clock);

  // Where connections go. Once, before the first. The transport must outlive what is taken, and
  // this until StopServing.
  Status ServeBy(Http2Transport& transport, int64_t stream_window_bytes,
                 Duration handshake_timeout);
  // Ends handshakes. No connection may be taken any more. Idempotent.
  void StopServing() { handshakes_.reset(); }
  // Whether the client may connect; if not, that is counted and logged. One thread.
  bool Admits(int socket);
  // Hands over a connected socket that has something to read. One thread. Returns what it is used
  // for; null: it is closed.
  std::shared_ptr<const ConnectionUse> Take(int socket);
  // Bounds unfinished messages. Counts what is read on connections that are handed over.
  std::shared_ptr<const MessageMemory> message_memory() const { return message_memory_; }
  // Ends what was handed over, if it is still open. Any thread.
  void End(int socket, ino_t inode, ClientRefusal reason);

 private:
  Intake(const Config& config, ConnectionHolds& connections, Metrics& metrics, Logger& logger,
         const Clock& clock);
  // A client that begins with a TLS handshake.
  void TakeTls(UniqueFd socket, ino_t inode, ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  // The handshake is done.
  void ServeTls(std::unique_ptr<TlsChannel> channel, ino_t inode, uint64_t generation,
                ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  // A connection is about to be closed, for what its client did if `why` is an error.
  void Ended(int socket, const Status& why);
  // True, and the connection is closed, if its client speaks without TLS.
  bool RefusesPlaintext(int socket);
  // The files of TLS have changed: ends the connections of clients that they do not let in.
  void RecheckClients();
  void Refuse(int socket, ClientRefusal reason, const std::string& error);
  // The same of what was handed over, and ends it, if it is still open.
  void End(int socket, ino_t inode, ClientRefusal reason, const std::string& error);
  void LogEnd(int socket, std::string_view reason, const std::string& error);
  void LogEndOf(const std::string& peer, std::string_view reason, const std::string& error);

  ConnectionHolds& connections_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  TlsMetrics tls_metrics_;
  // The users of Unix sockets, by their paths; none: anybody.
  std::map<std::string, std::vector<uid_t>, std::less<>> users_;
  const bool strangers_;  // there may be some: --tokens
  const std::shared_ptr<OpenCalls> calls_;
  const std::shared_ptr<MessageMemory> message_memory_;
  OpenSockets sockets_;
  const std::shared_ptr<TlsClients> tls_clients_ = std::make_shared<TlsClients>();
  std::unique_ptr<TlsCertificates> certificates_;  // null: no TLS
  Http2Transport* transport_ = nullptr;
  int64_t stream_window_bytes_ = 0;
  std::unique_ptr<TlsHandshakes> handshakes_;  // null: no TLS
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Hands accepted connections to the transport, plaintext or TLS, each with its counters and bounds.

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
  // Reads the TLS files, if configured. All references except `config` must outlive the object.
  static Result<std::unique_ptr<Intake>> Make(const Config& config, ConnectionHolds& connections,
                                              Metrics& metrics, Logger& logger, const Clock& clock);

  // Sets the transport. Call it once, before the first Take. The transport must outlive the
  // connections taken, and this object until StopServing.
  Status ServeBy(Http2Transport& transport, int64_t stream_window_bytes,
                 Duration handshake_timeout);
  // Aborts handshakes. No Take may follow. Idempotent.
  void StopServing() { handshakes_.reset(); }
  // Whether the client may connect; otherwise counts and logs the refusal. One thread.
  bool Admits(int socket);
  // Hands over a connected socket that has bytes to read. Returns its use, or null if it was
  // closed. One thread.
  std::shared_ptr<const ConnectionUse> Take(int socket);
  // The bound of unfinished messages, which counts bytes read on connections handed over.
  std::shared_ptr<const MessageMemory> message_memory() const { return message_memory_; }
  // Ends a connection that was handed over, if it is still open. Any thread.
  void End(int socket, ino_t inode, ClientRefusal reason);

 private:
  Intake(const Config& config, ConnectionHolds& connections, Metrics& metrics, Logger& logger,
         const Clock& clock);
  // For a connection that begins with a TLS handshake.
  void TakeTls(UniqueFd socket, ino_t inode, ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  // Serves a connection whose handshake is done.
  void ServeTls(std::unique_ptr<TlsChannel> channel, ino_t inode, uint64_t generation,
                ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  // A connection is about to be closed; `why` is an error if its client caused it.
  void Ended(int socket, const Status& why);
  // If the client speaks plaintext: refuses it, closes the socket and returns true.
  bool RefusesPlaintext(int socket);
  // After a change of TLS files: ends connections whose certificates are no longer accepted.
  void RecheckClients();
  void Refuse(int socket, ClientRefusal reason, const std::string& error);
  // The same for a connection that was handed over; also ends it, if it is still open.
  void End(int socket, ino_t inode, ClientRefusal reason, const std::string& error);
  void LogEnd(int socket, std::string_view reason, const std::string& error);
  void LogEndOf(const std::string& peer, std::string_view reason, const std::string& error);

  ConnectionHolds& connections_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  TlsMetrics tls_metrics_;
  // Users allowed on each Unix socket, by its path; an empty list allows any.
  std::map<std::string, std::vector<uid_t>, std::less<>> users_;
  const bool strangers_;  // callers must authenticate (--tokens)
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

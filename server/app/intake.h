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
#include "server/tls/tls_certificates.h"
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
  Status ServeBy(Http2Transport& transport, Duration handshake_timeout);
  // Aborts handshakes. No Take may follow. Idempotent.
  void StopServing();
  // Whether the client may connect; otherwise counts and logs the refusal. One thread.
  bool Admits(int socket);
  // Hands over a connected socket. Returns its use, or null if it was closed. One thread.
  std::shared_ptr<const ConnectionUse> Take(int socket);
  // The bound of unfinished messages, which counts bytes read on connections handed over.
  std::shared_ptr<const MessageMemory> message_memory() const { return message_memory_; }
  // Ends a connection that was handed over, if it is still open. Any thread.
  void End(const ConnectionUse& use, ConnectionRefusal reason);

 private:
  Intake(const Config& config, ConnectionHolds& connections, Metrics& metrics, Logger& logger,
         const Clock& clock);
  // For a connection that begins with a TLS handshake.
  void TakeTls(UniqueFd socket, ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  // Serves a connection whose handshake is done.
  void ServeTls(std::unique_ptr<TlsChannel> channel, uint64_t generation, ConnectionPeer peer,
                std::unique_ptr<H2Guard> guard);
  // A connection is about to be closed; `why` is an error if its client caused it.
  void Ended(int socket, const Status& why);
  // Whether the client, whose first bytes have come, speaks TLS; otherwise it is refused.
  bool SpeaksTls(int socket);
  void Refuse(int socket, ConnectionRefusal reason, const std::string& error);
  void LogEnd(const std::string& peer, ConnectionRefusal reason, const std::string& error);

  ConnectionHolds& connections_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  TlsMetrics tls_metrics_;
  struct UnixSocket {
    std::vector<uid_t> users;   // that may connect; empty: any
    std::optional<int> tenant;  // that its callers belong to
  };
  std::map<std::string, UnixSocket, std::less<>> unix_;  // by path
  const bool strangers_;                                 // callers must authenticate (--tokens)
  const std::shared_ptr<OpenCalls> calls_;
  const std::shared_ptr<MessageMemory> message_memory_;
  std::unique_ptr<TlsCertificates> certificates_;  // null: no TLS
  Http2Transport* transport_ = nullptr;
  std::unique_ptr<TlsHandshakes> handshakes_;  // null: no TLS
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The way of an accepted connection into gRPC or the own transport: with TLS or without, watched
// either way.

#pragma once

#include <grpcpp/server_builder.h>
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
#include "server/net/http2_frames.h"
#include "server/net/message_memory.h"
#include "server/net/open_calls.h"
#include "server/net/read_guard.h"
#include "server/rpc/caller_gate.h"
#include "server/tls/tls_certificates.h"
#include "server/tls/tls_clients.h"
#include "server/tls/tls_connection.h"
#include "server/tls/tls_handshakes.h"
#include "server/transport/http2_transport.h"
#include "server/transport/tls_channel.h"
#include "server/util/unique_fd.h"

namespace attend {

class Intake {
 public:
  // Reads the files of --tls-cert and so on, if there are any. `gate` refuses strangers that come
  // over TLS; null: none. The references but `config` must outlive the object.
  static Result<std::unique_ptr<Intake>> Make(const Config& config,
                                              std::shared_ptr<CallerGate> gate,
                                              ConnectionHolds& connections, Metrics& metrics,
                                              Logger& logger, const Clock& clock);

  // Once, before the server is built.
  Status AddTo(grpc::ServerBuilder& builder);
  // All connections go to this transport, not to gRPC. Once, before the first. It must outlive what
  // is taken, and this until StopServing.
  Status ServeBy(Http2Transport& transport, int64_t stream_window_bytes,
                 Duration handshake_timeout);
  // Ends handshakes. No connection may be taken any more. Idempotent.
  void StopServing() { handshakes_.reset(); }
  // Whether the client may connect; if not, that is counted and logged. One thread.
  bool Admits(int socket);
  // Hands over a connected socket that has something to read. One thread. Returns what it is used
  // for; null: it is closed.
  std::shared_ptr<const ConnectionUse> Take(int socket);
  // What unfinished messages may take. Counts what is read on connections that are handed over.
  std::shared_ptr<const MessageMemory> message_memory() const { return message_memory_; }
  // Ends what was handed over, if it is still open. Any thread.
  void End(int socket, ino_t inode, ClientRefusal reason);

 private:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  Intake(const Config& config, ConnectionHolds& connections, Metrics& metrics, Logger& logger,
         const Clock& clock);
  // False: it has been refused, and is closed.
  bool TakeOwn(int socket, ino_t inode, const std::string& peer, ConnectionHolds::Ref open,
               const Http2Frames::Limits& limits);
  // The same for a client that must shake hands first.
  void TakeOwnTls(UniqueFd socket, ino_t inode, ConnectionPeer peer,
                  std::unique_ptr<H2Guard> guard);
  // Hands are shaken.
  void ServeTls(std::unique_ptr<TlsChannel> channel, ino_t inode, uint64_t generation,
                ConnectionPeer peer, std::unique_ptr<H2Guard> guard);
  bool TakePlain(int socket, ino_t inode, const Http2Frames::Limits& limits);
  bool TakeTls(int socket, ino_t inode, const std::string& peer, const Http2Frames::Limits& limits);
  // True, and the connection is closed, if its client speaks without TLS.
  bool RefusesPlaintext(int socket);
  // Closes a socket whose client has not been told who it would be here.
  bool RefusesUnnamed(int socket, ino_t inode);
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
  const std::map<std::string, std::string, std::less<>> tenants_;  // of Unix sockets
  // Of Unix sockets, by their paths; none: anybody.
  std::map<std::string, std::vector<uid_t>, std::less<>> users_;
  const std::vector<MethodBound> method_bounds_;
  Http2Frames::Limits limits_;
  const bool strangers_;  // there may be some: --tokens
  const std::shared_ptr<OpenCalls> calls_;
  const std::shared_ptr<MessageMemory> message_memory_;
  const ReadGuard::OnWrong on_wrong_ = [this](int socket, const char* what) {
    metrics_.RecordConnectionRefused(ConnectionRefusal::kFrames);
    LogEnd(socket, ConnectionRefusalName(ConnectionRefusal::kFrames), what);
  };
  const TlsConnection::OnRefused on_refused_ = [this](int socket, const std::string& why) {
    Refuse(socket, ClientRefusal::kTls, why);
  };
  const std::shared_ptr<TlsClients> tls_clients_ = std::make_shared<TlsClients>();
  std::unique_ptr<TlsCertificates> certificates_;  // null: no TLS
  std::shared_ptr<CallerGate> gate_;
  std::unique_ptr<Acceptor> plain_;
  std::unique_ptr<Acceptor> tls_;
  Http2Transport* transport_ = nullptr;  // null: gRPC's
  int64_t stream_window_bytes_ = 0;
  std::unique_ptr<TlsHandshakes> handshakes_;  // of that transport
};

}  // namespace attend

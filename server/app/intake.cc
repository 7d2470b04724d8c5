// SPDX-License-Identifier: Apache-2.0
//
// TLS and plaintext are told apart by peeking at the first bytes. Ownership during a TLS handshake:
// the channel belongs to handshakes_, the guard to its completion callback; both then move to the
// transport. Each path ends in exactly one OnEnd of the guard, after which the connection's use has
// no socket, so End() of another thread never acts on a reused descriptor.

#include "server/app/intake.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "server/app/call_peer.h"
#include "server/app/unix_address.h"
#include "server/memory/memory_reserve.h"
#include "server/net/peer.h"
#include "server/tls/client_trust.h"
#include "server/util/assign.h"

namespace attend {
namespace {

// The rest is for complete messages.
int64_t MessageMemoryMax(const Config& config) {
  const int64_t all = config.message_memory_max_bytes;
  return all > 0 ? all / 4 * 3 : std::numeric_limits<int64_t>::max();
}

std::string WhyEnded(ConnectionRefusal reason) {
  if (reason == ConnectionRefusal::kSilent)
    return "no frame came in time, or before others needed its place";
  if (reason == ConnectionRefusal::kStranger)
    return "no call on it was accepted in time (--first-call-timeout)";
  return "its incomplete messages took the most memory when the limit was exceeded "
         "(--message-memory-max)";
}

// The first byte of every TLS handshake record.
constexpr char kTlsHandshake = 0x16;
constexpr std::string_view kTlsOnly = "this port accepts only TLS";

// The refusal in the client's own protocol: an HTTP/2 GOAWAY, or HTTP/1.1 text. No SETTINGS frame
// precedes the GOAWAY: gRPC clients would take the connection as established, and reconnect in a
// tight loop.
std::string RefusalOf(std::string_view beginning) {
  if (!beginning.starts_with("PRI")) {
    return "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
           "Content-Length: " +
           std::to_string(kTlsOnly.size() + 1) + "\r\n\r\n" + std::string(kTlsOnly) + "\n";
  }
  constexpr char kGoaway = 7;
  constexpr char kInadequateSecurity = 0xc;
  std::string frame({0, 0, static_cast<char>(8 + kTlsOnly.size()), kGoaway, 0, 0, 0, 0, 0});
  frame += std::string({0, 0, 0, 0, 0, 0, 0, kInadequateSecurity});
  return frame + std::string(kTlsOnly);
}

int FamilyOf(int socket) {
  int family = AF_UNSPEC;
  socklen_t size = sizeof(family);
  getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size);
  return family;
}

// The path of a listening Unix socket, or of a connection to one.
std::string PathOf(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  const char* const path = reinterpret_cast<const sockaddr*>(&address)->sa_data;
  return std::string(path, strnlen(path, sizeof(address) - offsetof(sockaddr, sa_data)));
}

Result<std::vector<uid_t>> FindUsers(const std::vector<std::string>& users) {
  std::vector<uid_t> ids;
  for (const std::string& user : users) {
    const std::optional<uid_t> id = FindUser(user);
    if (!id) return InvalidArgument("socket-users " + user + ": no such user");
    ids.push_back(*id);
  }
  return ids;
}

TlsCertificates::Options CertificateOptions(const Config& config) {
  TlsCertificates::Options options;
  options.cert = config.tls_cert;
  options.key = config.tls_key;
  options.client_ca = config.tls_client_ca;
  options.crl = config.tls_crl;
  options.context.require_client = config.tls_client_cert == "require";
  return options;
}

}  // namespace

Intake::Intake(const Config& config, ConnectionHolds& connections, Metrics& metrics, Logger& logger,
               const Clock& clock)
    : connections_(connections),
      metrics_(metrics),
      logger_(logger),
      clock_(clock),
      tls_metrics_(*metrics.registry()),
      strangers_(!config.tokens.empty()),
      calls_(std::make_shared<OpenCalls>(MaxCalls(config), MaxCallsPerPeer(config))),
      message_memory_(std::make_shared<MessageMemory>(MessageMemoryMax(config))) {}

Result<std::unique_ptr<Intake>> Intake::Make(const Config& config, ConnectionHolds& connections,
                                             Metrics& metrics, Logger& logger, const Clock& clock) {
  std::unique_ptr<Intake> intake(new Intake(config, connections, metrics, logger, clock));
  if (const auto all = FindUsers(config.socket_users); !all.ok()) return all.status();
  for (const std::string& address : config.listen) {
    if (!address.starts_with("unix:")) continue;
    const Result<UnixAddress> parsed = UnixAddressOf(address, config);
    if (!parsed.ok()) return parsed.status();
    Result<std::vector<uid_t>> users = FindUsers(parsed->users);
    if (!users.ok()) return users.status();
    UnixSocket& unix = intake->unix_[parsed->path];
    unix.users = std::move(*users);
    if (!parsed->tenant.empty()) unix.tenant = config.tenants.Find(parsed->tenant);
  }
  if (config.tls_cert.empty()) return intake;
  ATTEND_RETURN_IF_ERROR(
      Assign(intake->certificates_,
             TlsCertificates::Load(CertificateOptions(config), intake->tls_metrics_, logger)));
  return intake;
}

Status Intake::ServeBy(Http2Transport& transport, Duration handshake_timeout) {
  transport_ = &transport;
  if (certificates_ == nullptr) return Status();
  certificates_->Watch(clock_, [&transport] { transport.Recheck(); });
  ATTEND_RETURN_IF_ERROR(
      Assign(handshakes_, TlsHandshakes::Start(handshake_timeout, clock_,
                                               [this](int socket) { return SpeaksTls(socket); })));
  return Status();
}

void Intake::StopServing() {
  if (certificates_ != nullptr) certificates_->StopWatching();
  handshakes_.reset();
}

std::shared_ptr<const ConnectionUse> Intake::Take(int socket) {
  const bool tcp = FamilyOf(socket) != AF_UNIX;
  const bool handshakes = tcp && handshakes_ != nullptr;
  UniqueFd owned(socket);
  const int on = 1;
  if (tcp) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::shared_ptr<ConnectionUse> use;
  const bool taken = TryAllocating([&] {
    const std::string peer = PeerOf(socket);
    const ConnectionHolds::Ref open = connections_.Begin(peer);
    ConnectionPeer client{.address = CallPeer(socket),
                          .local = !tcp || IsFromLoopback(socket),
                          .tenant = tcp ? std::nullopt : unix_.at(PathOf(socket)).tenant,
                          .holds = open};
    use = std::make_shared<ConnectionUse>(socket);
    if (strangers_) use->marks = open->marks();
    auto guard = std::make_unique<H2Guard>(
        H2Guard::Parts{calls_->Of(peer), open, use, message_memory_,
                       [this, socket](const Status& why) { Ended(socket, why); }});
    if (handshakes) {
      TakeTls(std::move(owned), std::move(client), std::move(guard));
    } else {
      transport_->Serve(std::make_unique<PlainChannel>(std::move(owned)), std::move(client),
                        std::move(guard));
    }
  });
  return taken ? use : nullptr;
}

void Intake::Ended(int socket, const Status& why) {
  if (why.ok()) return;
  ConnectionRefusal reason = ConnectionRefusal::kFrames;
  if (why.code() == Code::kDeadlineExceeded) reason = ConnectionRefusal::kStalled;
  if (why.code() == Code::kUnavailable) reason = ConnectionRefusal::kSilent;
  Refuse(socket, reason, why.message());
}

void Intake::TakeTls(UniqueFd socket, ConnectionPeer peer, std::unique_ptr<H2Guard> guard) {
  const uint64_t generation = certificates_->generation();
  const std::string name = PeerOf(socket.get());
  auto channel =
      std::make_unique<TlsChannel>(std::move(socket), certificates_->current()->get(), clock_);
  // std::function needs a copyable capture.
  const auto waiting = std::make_shared<std::pair<ConnectionPeer, std::unique_ptr<H2Guard>>>(
      std::move(peer), std::move(guard));
  handshakes_->Begin(
      name, std::move(channel),
      [this, generation, waiting](std::unique_ptr<TlsChannel> ended, bool established) {
        if (established) {
          return ServeTls(std::move(ended), generation, std::move(waiting->first),
                          std::move(waiting->second));
        }
        const auto reason = ended->spoke() ? ConnectionRefusal::kTls : ConnectionRefusal::kSilent;
        if (!ended->wrong().empty()) Refuse(ended->socket(), reason, ended->wrong());
        ended->End();  // after Refuse: a client that sees the end finds it counted
        waiting->second->OnEnd(Status());
      });
}

void Intake::ServeTls(std::unique_ptr<TlsChannel> channel, uint64_t generation, ConnectionPeer peer,
                      std::unique_ptr<H2Guard> guard) {
  const int socket = channel->socket();
  const bool served = TryAllocating([&] {
    peer.encrypted = true;
    if (X509* const shown = SSL_get0_peer_certificate(channel->ssl())) {
      AddCertificateNames(shown, peer);
      const auto trust = std::make_shared<ClientTrust>(*certificates_, channel->ssl(), generation);
      const auto is_trusted = [this, trust, socket] {
        return trust->IsTrusted(
            [&](const std::string& why) { Refuse(socket, ConnectionRefusal::kTls, why); });
      };
      // The TLS files changed during the handshake.
      if (!is_trusted()) return guard->OnEnd(Status());
      channel->SetTrustCheck(is_trusted);
    }
    transport_->Serve(std::move(channel), std::move(peer), std::move(guard));
  });
  if (!served) metrics_.RecordConnectionRefused(ConnectionRefusal::kTls);
}

bool Intake::SpeaksTls(int socket) {
  std::array<char, 3> first{};
  const ssize_t bytes = recv(socket, first.data(), first.size(), MSG_PEEK | MSG_DONTWAIT);
  if (bytes <= 0 || first[0] == kTlsHandshake) return true;
  Refuse(socket, ConnectionRefusal::kPlaintext, std::string(kTlsOnly));
  const std::string answer = RefusalOf({first.data(), static_cast<size_t>(bytes)});
  send(socket, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  shutdown(socket, SHUT_WR);
  return false;
}

bool Intake::Admits(int socket) {
  if (FamilyOf(socket) != AF_UNIX) return true;
  const auto found = unix_.find(PathOf(socket));
  if (found != unix_.end()) {
    const std::vector<uid_t>& users = found->second.users;
    ucred client{};
    socklen_t size = sizeof(client);
    if (users.empty()) return true;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &client, &size) == 0 &&
        std::find(users.begin(), users.end(), client.uid) != users.end()) {
      return true;
    }
  }
  Refuse(socket, ConnectionRefusal::kUser,
         "its user may not connect to this socket (--socket-users)");
  return false;
}

void Intake::End(const ConnectionUse& use, ConnectionRefusal reason) {
  std::string peer;
  use.WhileOpen([&](int socket) {
    peer = PeerText(socket);
    metrics_.RecordConnectionRefused(reason);
    shutdown(socket, SHUT_RDWR);  // the transport then closes it
  });
  if (!peer.empty()) LogEnd(peer, reason, WhyEnded(reason));
}

void Intake::Refuse(int socket, ConnectionRefusal reason, const std::string& error) {
  metrics_.RecordConnectionRefused(reason);
  // The transport called this, and no exception may reach it.
  TryAllocating([&] { LogEnd(PeerText(socket), reason, error); });
}

void Intake::LogEnd(const std::string& peer, ConnectionRefusal reason, const std::string& error) {
  logger_.Log(LogLevel::warn, "connection closed",
              {{"reason", ConnectionRefusalName(reason)}, {"peer", peer}, {"error", error}}, error);
}

}  // namespace attend

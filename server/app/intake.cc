// SPDX-License-Identifier: Apache-2.0
//
// The listener hands over a connection with its first byte, so TLS and plaintext are told apart by
// peeking. Ownership during a TLS handshake: the channel belongs to handshakes_, the guard to its
// completion callback; both then move to the transport. Each path ends in exactly one OnEnd of the
// guard, which removes the socket from sockets_ before it is closed, so End() of another thread
// never acts on a reused descriptor.

#include "server/app/intake.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pwd.h>
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
#include "server/util/parse_number.h"

namespace attend {
namespace {

// The rest is for complete messages.
int64_t MessageMemoryMax(const Config& config) {
  const int64_t all = config.message_memory_max_bytes;
  return all > 0 ? all / 4 * 3 : std::numeric_limits<int64_t>::max();
}

std::string WhyEnded(ClientRefusal reason) {
  if (reason == ClientRefusal::kStranger)
    return "no call on it was accepted in time (--first-call-timeout)";
  if (reason == ClientRefusal::kStalled) return "a message made no progress (--message-timeout)";
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
    const struct passwd* const found = getpwnam(user.c_str());
    const std::optional<uid_t> id = found != nullptr ? found->pw_uid : ParseNumber<uid_t>(user);
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
    intake->users_[parsed->path] = std::move(*users);
  }
  if (config.tls_cert.empty()) return intake;
  Result<std::unique_ptr<TlsCertificates>> certificates =
      TlsCertificates::Load(CertificateOptions(config), intake->tls_metrics_, logger);
  if (!certificates.ok()) return certificates.status();
  intake->certificates_ = std::move(*certificates);
  intake->certificates_->Watch(clock, [raw = intake.get()] { raw->RecheckClients(); });
  return intake;
}

Status Intake::ServeBy(Http2Transport& transport, int64_t stream_window_bytes,
                       Duration handshake_timeout) {
  transport_ = &transport;
  stream_window_bytes_ = stream_window_bytes;
  if (certificates_ == nullptr) return Status();
  Result<std::unique_ptr<TlsHandshakes>> handshakes =
      TlsHandshakes::Start(handshake_timeout, clock_);
  if (!handshakes.ok()) return handshakes.status();
  handshakes_ = std::move(*handshakes);
  return Status();
}

std::shared_ptr<const ConnectionUse> Intake::Take(int socket) {
  struct stat about {};
  const bool tcp = FamilyOf(socket) != AF_UNIX;
  if (fstat(socket, &about) != 0) {
    close(socket);
    return nullptr;
  }
  const bool handshakes = tcp && handshakes_ != nullptr;
  if (handshakes && RefusesPlaintext(socket)) return nullptr;
  UniqueFd owned(socket);
  const int on = 1;
  if (tcp) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  std::shared_ptr<ConnectionUse> use;
  const bool taken = TryAllocating([&] {
    const std::string peer = PeerOf(socket);
    ConnectionPeer client{.address = CallPeer(socket, about.st_ino)};
    ConnectionHolds::Ref open = connections_.Begin(client.address, peer);
    use = std::make_shared<ConnectionUse>(message_memory_);
    if (strangers_ || handshakes) use->marks = open->marks();
    sockets_.Begin(socket, about.st_ino);
    auto guard = std::make_unique<H2Guard>(
        H2Guard::Parts{calls_->Of(peer), std::move(open), use, stream_window_bytes_,
                       [this, socket](const Status& why) { Ended(socket, why); }},
        clock_);
    if (handshakes) {
      TakeTls(std::move(owned), about.st_ino, std::move(client), std::move(guard));
    } else {
      transport_->Serve(std::make_unique<PlainChannel>(std::move(owned)), std::move(client),
                        std::move(guard));
    }
  });
  if (taken) return use;
  sockets_.End(socket);
  return nullptr;
}

void Intake::Ended(int socket, const Status& why) {
  if (!why.ok()) {
    metrics_.RecordConnectionRefused(ConnectionRefusal::kFrames);
    LogEnd(socket, ConnectionRefusalName(ConnectionRefusal::kFrames), why.message());
  }
  sockets_.End(socket);
}

void Intake::TakeTls(UniqueFd socket, ino_t inode, ConnectionPeer peer,
                     std::unique_ptr<H2Guard> guard) {
  const uint64_t generation = certificates_->generation();
  const std::string name = PeerOf(socket.get());
  auto channel =
      std::make_unique<TlsChannel>(std::move(socket), certificates_->current()->get(), clock_);
  // std::function needs a copyable capture.
  const auto waiting = std::make_shared<std::pair<ConnectionPeer, std::unique_ptr<H2Guard>>>(
      std::move(peer), std::move(guard));
  handshakes_->Begin(
      name, std::move(channel),
      [this, inode, generation, waiting](std::unique_ptr<TlsChannel> ended, bool established) {
        if (established) {
          return ServeTls(std::move(ended), inode, generation, std::move(waiting->first),
                          std::move(waiting->second));
        }
        if (!ended->wrong().empty()) Refuse(ended->socket(), ClientRefusal::kTls, ended->wrong());
        ended->End();  // after Refuse: a client that sees the end finds it counted
        waiting->second->OnEnd(Status());
      });
}

void Intake::ServeTls(std::unique_ptr<TlsChannel> channel, ino_t inode, uint64_t generation,
                      ConnectionPeer peer, std::unique_ptr<H2Guard> guard) {
  const int socket = channel->socket();
  const bool served = TryAllocating([&] {
    peer.encrypted = true;
    // Where calls need no credentials, a client that has completed TLS is no stranger.
    if (!strangers_) connections_.CallUncounted(peer.address);
    if (std::shared_ptr<TlsClient> client = MakeTlsClient(channel->ssl(), socket, inode)) {
      AddCertificateNames(client->certificate.get(), peer);
      const auto trust = std::make_shared<ClientTrust>(*certificates_, tls_clients_,
                                                       std::move(client), generation);
      const auto is_trusted = [this, trust, socket] {
        return trust->IsTrusted(
            [&](const std::string& why) { Refuse(socket, ClientRefusal::kTls, why); });
      };
      // The TLS files changed during the handshake.
      if (!is_trusted()) return guard->OnEnd(Status());
      channel->SetTrustCheck(is_trusted);
    }
    transport_->Serve(std::move(channel), std::move(peer), std::move(guard));
  });
  if (!served) tls_metrics_.RecordRefused(ClientRefusal::kTls);
}

bool Intake::RefusesPlaintext(int socket) {
  std::array<char, 3> first{};
  const ssize_t bytes = recv(socket, first.data(), first.size(), MSG_PEEK | MSG_DONTWAIT);
  if (bytes <= 0 || first[0] == kTlsHandshake) return false;
  Refuse(socket, ClientRefusal::kPlaintext, std::string(kTlsOnly));
  const std::string answer = RefusalOf({first.data(), static_cast<size_t>(bytes)});
  send(socket, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  shutdown(socket, SHUT_WR);
  // Unread bytes would make close() reset the connection before the client has read the answer.
  std::array<char, 4096> unread;
  for (int i = 0; i < 16 && recv(socket, unread.data(), unread.size(), MSG_DONTWAIT) > 0; ++i) {
  }
  close(socket);
  return true;
}

bool Intake::Admits(int socket) {
  if (FamilyOf(socket) != AF_UNIX) return true;
  const auto users = users_.find(PathOf(socket));
  if (users != users_.end() && users->second.empty()) return true;
  ucred client{};
  socklen_t size = sizeof(client);
  if (users != users_.end() && getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &client, &size) == 0 &&
      std::find(users->second.begin(), users->second.end(), client.uid) != users->second.end()) {
    return true;
  }
  Refuse(socket, ClientRefusal::kUser, "its user may not connect to this socket (--socket-users)");
  return false;
}

void Intake::End(int socket, ino_t inode, ClientRefusal reason) {
  End(socket, inode, reason, WhyEnded(reason));
}

void Intake::RecheckClients() {
  tls_clients_->Recheck(*certificates_->current(),
                        [this](const TlsClient& client, const auto& why) {
                          End(client.socket, client.inode, ClientRefusal::kTls, why);
                        });
}

void Intake::End(int socket, ino_t inode, ClientRefusal reason, const std::string& error) {
  std::string peer;
  sockets_.WhileOpen(socket, inode, [&] {
    peer = PeerText(socket);
    tls_metrics_.RecordRefused(reason);
    shutdown(socket, SHUT_RDWR);  // the transport then closes it
  });
  if (peer.empty()) return;
  LogEndOf(peer, ClientRefusalName(reason), error);
}

void Intake::Refuse(int socket, ClientRefusal reason, const std::string& error) {
  tls_metrics_.RecordRefused(reason);
  LogEnd(socket, ClientRefusalName(reason), error);
}

void Intake::LogEnd(int socket, std::string_view reason, const std::string& error) {
  // Counted already. The transport called this, and no exception may reach it.
  TryAllocating([&] { LogEndOf(PeerText(socket), reason, error); });
}

void Intake::LogEndOf(const std::string& peer, std::string_view reason, const std::string& error) {
  logger_.Log(LogLevel::warn, "connection closed",
              {{"reason", reason}, {"peer", peer}, {"error", error}}, error);
}

}  // namespace attend

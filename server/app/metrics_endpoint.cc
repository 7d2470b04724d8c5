// SPDX-License-Identifier: Apache-2.0
//
// One poll() loop. All state belongs to its thread, so there is no lock. Scrapes are answered in
// the loop itself, since they are short; a slow reader holds only its own connection, for at most
// kConnectionTime.

#include "server/app/metrics_endpoint.h"

#include <poll.h>
#include <prometheus/text_serializer.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "kernels/util/thread_name.h"
#include "server/net/peer.h"
#include "server/net/tcp_listener.h"
#include "server/util/assign.h"
#include "server/util/wipe.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Time for a connection to send its request and read the answer.
constexpr Duration kConnectionTime = seconds(10);
// The pause after accept has failed.
constexpr Duration kRest = milliseconds(100);

HttpAnswer Probe(const char* ailment) {
  if (ailment == nullptr) return {.body = "ok\n"};
  return {.status = "503 Service Unavailable", .body = ailment};
}

bool NothingToAccept() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(Options options,
                                                                Collectors collectors,
                                                                TlsMetrics& tls_metrics,
                                                                Logger& logger) {
  std::unique_ptr<MetricsEndpoint> endpoint(
      new MetricsEndpoint(std::move(options), std::move(collectors), tls_metrics, logger));
  ATTEND_RETURN_IF_ERROR(endpoint->ReadCertificates());
  ATTEND_RETURN_IF_ERROR(endpoint->ReadCallers());
  ATTEND_RETURN_IF_ERROR(endpoint->Listen());
  endpoint->thread_ = std::thread([raw = endpoint.get()] { raw->Run(); });
  return endpoint;
}

Status MetricsEndpoint::ReadCertificates() {
  if (options_.tls.cert.empty()) return Status();
  TlsCertificates::Options files;
  files.settings = options_.tls.settings;
  files.cert = options_.tls.cert;
  files.key = options_.tls.key;
  files.context.http2 = false;
  files.of = TlsFile::kMetricsCert;
  ATTEND_RETURN_IF_ERROR(
      Assign(certificates_, TlsCertificates::Load(std::move(files), tls_metrics_, logger_)));
  return Status();
}

Status MetricsEndpoint::ReadCallers() {
  if (options_.auth_file.empty()) return Status();
  Result<std::unique_ptr<Authenticator>> authenticator = Authenticator::Load(
      {.file = options_.auth_file,
       .tenants = options_.tenants,
       .now = [] { return std::chrono::floor<seconds>(std::chrono::system_clock::now()); },
       .on_reload = [this](const Status& status, int64_t) { LogReload(status); }});
  if (!authenticator.ok()) {
    return InvalidArgument("metrics-auth: " + authenticator.status().message());
  }
  authenticator_ = std::move(*authenticator);
  return Status();
}

Status MetricsEndpoint::Listen() {
  Result<TcpListeners> listeners = ListenTcp(
      options_.address, {}, options_.loopback_only ? TcpReach::kThisMachine : TcpReach::kAnyone);
  if (!listeners.ok()) {
    return Unavailable("metrics-listen " + options_.address +
                       " cannot be bound: " + listeners.status().message());
  }
  listeners_ = std::move(listeners->sockets);
  port_ = listeners->port;
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  spare_ = OpenSpare();
  if (wake_.valid() && spare_.valid()) return Status();
  return Internal(std::string("cannot create descriptors for the metrics endpoint: ") +
                  std::strerror(errno));
}

MetricsEndpoint::~MetricsEndpoint() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void MetricsEndpoint::Run() {
  NameThread("attend-metrics");
  const HttpConnection::Answer answer = [this](const HttpRequest& request) {
    return Answer(request);
  };
  std::vector<pollfd> polled;
  for (;;) {
    const bool accepting = clock_.Now() >= rest_until_;
    polled.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    for (const UniqueFd& listener : listeners_) {
      polled.push_back({listener.get(), static_cast<short>(accepting ? POLLIN : 0), 0});
    }
    const size_t first = polled.size();
    for (const Open& each : connections_) {
      polled.push_back({each.http.socket(), each.http.events(), 0});
    }
    if (poll(polled.data(), polled.size(), WaitMs()) < 0) continue;  // EINTR
    if (polled[0].revents != 0) return;
    size_t at = first;
    for (auto each = connections_.begin(); each != connections_.end(); ++at) {
      const bool late = clock_.Now() - each->http.since() >= kConnectionTime;
      const bool over = late || (polled[at].revents != 0 && !each->http.Serve(answer));
      each = over ? connections_.erase(each) : std::next(each);
    }
    if (!spare_.valid()) spare_ = OpenSpare();
    for (size_t i = 1; i < first; ++i) {
      if (polled[i].revents != 0) Accept(polled[i].fd);
    }
  }
}

int MetricsEndpoint::WaitMs() const {
  const TimePoint now = clock_.Now();
  TimePoint until = now < rest_until_ ? rest_until_ : kNever;
  if (!connections_.empty()) {
    until = std::min(until, connections_.front().http.since() + kConnectionTime);
  }
  if (until == kNever) return -1;
  return static_cast<int>(
      std::max<int64_t>(0, std::chrono::ceil<milliseconds>(until - now).count()));
}

void MetricsEndpoint::Accept(int listener) {
  for (int i = 0; i < kConnectionsMax; ++i) {
    UniqueFd socket = attend::Accept(listener);
    if (!socket.valid() && (errno == EMFILE || errno == ENFILE) && spare_.valid()) {
      spare_.Reset();
      socket = attend::Accept(listener);
    }
    if (!socket.valid()) {
      if (!NothingToAccept() && errno != ECONNABORTED) rest_until_ = clock_.Now() + kRest;
      return;
    }
    Add(std::move(socket));
  }
}

void MetricsEndpoint::Add(UniqueFd socket) {
  std::unique_ptr<SSL, FreeSsl> ssl;
  if (certificates_ != nullptr) {
    certificates_->Look();
    ssl.reset(SSL_new(certificates_->current()->get()));
    if (ssl == nullptr) return;  // never fall back to plaintext
    SSL_set_accept_state(ssl.get());
  }
  if (connections_.size() >= kConnectionsMax) MakeRoom();
  std::string peer = PeerOf(socket.get());
  const bool local = IsFromLoopback(socket.get());
  connections_.push_back(
      {HttpConnection(std::move(socket), std::move(ssl), local, clock_.Now()), std::move(peer)});
}

void MetricsEndpoint::MakeRoom() {
  std::map<std::string_view, int> counts;
  for (const Open& each : connections_) ++counts[each.peer];
  auto most = connections_.begin();
  for (auto each = connections_.begin(); each != connections_.end(); ++each) {
    if (counts[each->peer] > counts[most->peer]) most = each;
  }
  connections_.erase(most);
}

void MetricsEndpoint::LogReload(const Status& status) {
  tls_metrics_.RecordMetricsAuth(status.ok());
  if (status.ok()) {
    logger_.Log(LogLevel::info, "changed file in use", {{"flag", "metrics-auth"}});
  } else {
    logger_.Log(LogLevel::err, "changed file cannot be used; the previous one stays in use",
                {{"flag", "metrics-auth"}, {"error", status.message()}});
  }
}

HttpAnswer MetricsEndpoint::Answer(const HttpRequest& request) {
  if (request.method != "GET" && request.method != "HEAD") {
    return {.status = "405 Method Not Allowed", .body = "only GET and HEAD are allowed\n"};
  }
  if (request.path == "/healthz") return Probe(options_.ailment());
  if (request.path == "/readyz") return Probe(options_.ready() ? nullptr : "not ready\n");
  if (request.path == "/metrics") return AnswerMetrics(request);
  return {.status = "404 Not Found", .body = "metrics are at /metrics\n"};
}

Code MetricsEndpoint::Allow(const HttpRequest& request) const {
  Credentials credentials;
  credentials.encrypted = certificates_ != nullptr;
  credentials.local = request.local;
  std::string bearer;
  const WipedAtEnd wiped(bearer);
  auto basic = ParseBasic(request.authorization);
  if (basic) {
    bearer = "Bearer " + basic->second;
    Wipe(basic->second);
    credentials.authorization = bearer;
  } else if (!request.authorization.empty()) {
    credentials.authorization = request.authorization;
  }
  const Decision decision = authenticator_->Decide(credentials, Scope::kInfo);
  if (!decision.status.ok()) return decision.status.code();
  return !basic || basic->first == *decision.caller.name ? Code::kOk : kUnauthenticated;
}

HttpAnswer MetricsEndpoint::AnswerMetrics(const HttpRequest& request) {
  if (authenticator_ != nullptr) {
    authenticator_->Reload();
    const Code allowed = Allow(request);
    if (allowed == Code::kPermissionDenied) {
      return {.status = "403 Forbidden", .body = "the caller needs the scope info\n"};
    }
    if (allowed != Code::kOk) {
      return {.status = "401 Unauthorized",
              .body = "a token is required, as bearer or password, over TLS or loopback\n",
              .challenge = "Bearer realm=\"attend\", Basic realm=\"attend\""};
    }
  }
  try {
    return {.body = Collect(), .type = "text/plain; version=0.0.4; charset=utf-8"};
  } catch (const std::exception& error) {
    return {.status = "503 Service Unavailable", .body = std::string(error.what()) + "\n"};
  }
}

std::string MetricsEndpoint::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collect : collectors_) {
    for (prometheus::MetricFamily& family : collect()) families.push_back(std::move(family));
  }
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, families);
  return std::move(text).str();
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/app/metrics_endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <prometheus/text_serializer.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <sstream>
#include <string_view>
#include <utility>

#include "kernels/util/thread_name.h"
#include "server/net/tcp_listener.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The time that a connection has to send its request and to read the answer.
constexpr Duration kConnectionTime = seconds(10);
// How long not to accept after accepting a connection has failed.
constexpr Duration kRest = milliseconds(100);
constexpr size_t kRequestBytesMax = 8192;

UniqueFd OpenSpare() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

std::string Http(std::string_view status, std::string_view body, bool with_body,
                 std::string_view type = "text/plain") {
  std::string text = "HTTP/1.1 " + std::string(status) + "\r\nContent-Type: " + std::string(type) +
                     "\r\nContent-Length: " + std::to_string(body.size()) +
                     "\r\nConnection: close\r\n\r\n";
  if (with_body) text += body;
  return text;
}

}  // namespace

Result<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& address,
                                                                Collectables collectables) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint(std::move(collectables)));
  Result<TcpListeners> listeners = ListenTcp(address);
  if (!listeners.ok()) {
    return Unavailable("metrics-listen " + address +
                       " cannot be bound: " + listeners.status().message());
  }
  endpoint->listeners_ = std::move(listeners->sockets);
  endpoint->port_ = listeners->port;
  endpoint->wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  endpoint->spare_ = OpenSpare();
  if (!endpoint->wake_.valid() || !endpoint->spare_.valid()) {
    return Internal(std::string("no descriptors for metrics: ") + std::strerror(errno));
  }
  endpoint->thread_ = std::thread([raw = endpoint.get()] { raw->Run(); });
  return endpoint;
}

MetricsEndpoint::~MetricsEndpoint() {
  if (!thread_.joinable()) return;
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void MetricsEndpoint::Run() {
  NameThread("attend-metrics");
  std::vector<pollfd> polled;
  for (;;) {
    const bool accepting = clock_.Now() >= rest_until_;
    polled.clear();
    polled.push_back({wake_.get(), POLLIN, 0});
    for (const UniqueFd& listener : listeners_) {
      polled.push_back({listener.get(), static_cast<short>(accepting ? POLLIN : 0), 0});
    }
    const size_t first = polled.size();
    for (const Connection& each : connections_) {
      const short events = each.answer.empty() ? POLLIN : POLLOUT;
      polled.push_back({each.socket.get(), events, 0});
    }
    if (poll(polled.data(), polled.size(), WaitMs()) < 0) continue;  // EINTR
    if (polled[0].revents != 0) return;
    size_t at = first;
    for (auto each = connections_.begin(); each != connections_.end(); ++at) {
      const bool late = clock_.Now() - each->since >= kConnectionTime;
      const bool over = late || (polled[at].revents != 0 && !Serve(*each));
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
  if (!connections_.empty()) until = std::min(until, connections_.front().since + kConnectionTime);
  if (until == kNever) return -1;
  return static_cast<int>(
      std::max<int64_t>(0, std::chrono::ceil<milliseconds>(until - now).count()));
}

void MetricsEndpoint::Accept(int listener) {
  for (int i = 0; i < kConnectionsMax; ++i) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid() && (errno == EMFILE || errno == ENFILE) && spare_.valid()) {
      spare_.Reset();
      socket = UniqueFd(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    }
    if (!socket.valid()) {
      if (!WouldBlock() && errno != ECONNABORTED) rest_until_ = clock_.Now() + kRest;
      return;
    }
    if (connections_.size() >= kConnectionsMax) connections_.pop_front();
    connections_.push_back({std::move(socket), clock_.Now(), {}, {}, 0});
  }
}

bool MetricsEndpoint::Serve(Connection& connection) const {
  if (connection.answer.empty() && !Read(connection)) return false;
  return connection.answer.empty() || Write(connection);
}

bool MetricsEndpoint::Read(Connection& connection) const {
  std::array<char, 2048> bytes;
  const ssize_t got = recv(connection.socket.get(), bytes.data(), bytes.size(), 0);
  if (got < 0) return WouldBlock();
  if (got == 0) return false;
  std::string& request = connection.request;
  request.append(bytes.data(), static_cast<size_t>(got));
  if (request.find("\r\n\r\n") != std::string::npos || request.find("\n\n") != std::string::npos) {
    connection.answer = Answer(request);
  } else if (request.size() > kRequestBytesMax) {
    connection.answer = Http("431 Request Header Fields Too Large", "", true);
  }
  return true;
}

bool MetricsEndpoint::Write(Connection& connection) const {
  const std::string& answer = connection.answer;
  const ssize_t sent = send(connection.socket.get(), answer.data() + connection.sent,
                            answer.size() - connection.sent, MSG_NOSIGNAL);
  if (sent < 0) return WouldBlock();
  connection.sent += static_cast<size_t>(sent);
  return connection.sent < answer.size();
}

std::string MetricsEndpoint::Answer(const std::string& request) const {
  const std::string_view line = std::string_view(request).substr(0, request.find_first_of("\r\n"));
  const size_t space = line.find(' ');
  const std::string_view method = line.substr(0, space);
  std::string_view path = space == std::string_view::npos ? "" : line.substr(space + 1);
  path = path.substr(0, path.find_first_of(" ?"));
  if (method != "GET" && method != "HEAD") {
    return Http("405 Method Not Allowed", "metrics are read with GET\n", true);
  }
  const bool with_body = method == "GET";
  if (path != "/metrics") return Http("404 Not Found", "metrics are at /metrics\n", with_body);
  try {
    return Http("200 OK", Collect(), with_body, "text/plain; version=0.0.4; charset=utf-8");
  } catch (const std::exception& error) {
    return Http("503 Service Unavailable", std::string(error.what()) + "\n", with_body);
  }
}

std::string MetricsEndpoint::Collect() const {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& each : collectables_) {
    for (prometheus::MetricFamily& family : each->Collect()) families.push_back(std::move(family));
  }
  std::ostringstream text;
  prometheus::TextSerializer().Serialize(text, families);
  return std::move(text).str();
}

}  // namespace attend

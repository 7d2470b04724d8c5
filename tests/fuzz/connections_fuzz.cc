// SPDX-License-Identifier: Apache-2.0
//
// HTTP requests to the metrics endpoint: each complete one gets a valid answer. transport_fuzz
// covers the connections of the gRPC service.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/registry.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <string_view>

#include "server/app/metrics_endpoint.h"
#include "server/metrics/tls_metrics.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

// The answer to a request, "" if the request is incomplete.
std::string Ask(int port, std::string_view request) {
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // Closes with a reset, as ports in TIME_WAIT would run out.
  const linger reset{1, 0};
  setsockopt(client, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  const timeval patience{60, 0};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ATTEND_FUZZ_REQUIRE(
      connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
      std::to_string(port));
  std::string answer;
  if (send(client, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
    shutdown(client, SHUT_WR);
    char bytes[4096];
    for (;;) {
      const ssize_t got = Receive(client, bytes, sizeof(bytes));
      ATTEND_FUZZ_REQUIRE(got >= 0 || errno == ECONNRESET, "no end");
      if (got <= 0) break;
      answer.append(bytes, static_cast<size_t>(got));
    }
  }
  close(client);
  return answer;
}

void AskMetrics(std::string_view input) {
  static auto* const endpoint = [] {
    static const auto logger = MakeLogger({.level = LogLevel::off, .file = {}, .options = {}});
    ATTEND_FUZZ_REQUIRE(logger.ok(), logger.status().ToString());
    static prometheus::Registry registry;
    static TlsMetrics tls_metrics(registry);
    auto started = MetricsEndpoint::Start(
        {.address = "127.0.0.1:0", .ready = [] { return true; }, .ailment = [] { return nullptr; }},
        {}, tls_metrics, **logger);
    ATTEND_FUZZ_REQUIRE(started.ok(), started.status().ToString());
    return started->release();
  }();
  const std::string answer = Ask(endpoint->port(), input);
  if (answer.empty()) return;  // the request was incomplete
  const bool known = answer.starts_with("HTTP/1.1 200 ") || answer.starts_with("HTTP/1.1 404 ") ||
                     answer.starts_with("HTTP/1.1 405 ") || answer.starts_with("HTTP/1.1 431 ");
  ATTEND_FUZZ_REQUIRE(known && answer.find("\r\n\r\n") != answer.npos, answer);
  if (answer.starts_with("HTTP/1.1 200 ")) {
    const std::string_view path = input.substr(input.find(' ') + 1);
    ATTEND_FUZZ_REQUIRE(
        path.starts_with("/metrics") || path.starts_with("/healthz") || path.starts_with("/readyz"),
        std::string(input));
  }
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = attend::fuzz::View(data, size);
  // Other inputs are not sent, as most of the time would go to their connections.
  if (input.starts_with("GET ") || input.starts_with("HEAD ")) attend::fuzz::AskMetrics(input);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// /metrics with clients that send nothing, incomplete requests, or too much.

#include "server/app/metrics_endpoint.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/null_sink.h>
#include <sys/socket.h>

#include <atomic>
#include <string>
#include <vector>

#include "server/metrics/make_family.h"

namespace attend {
namespace {

class MetricsEndpointTest : public ::testing::Test {
 protected:
  MetricsEndpointTest() {
    MakeGauge(*registry_, "attend_answer", "The answer").Set(42);
    Result<std::unique_ptr<MetricsEndpoint>> endpoint = Start("127.0.0.1:0");
    if (endpoint.ok()) endpoint_ = std::move(*endpoint);
  }

  Result<std::unique_ptr<MetricsEndpoint>> Start(const std::string& address) {
    return MetricsEndpoint::Start({.address = address,
                                   .ready = [this] { return ready_.load(); },
                                   .ailment = [this] { return ailment_.load(); }},
                                  {[this] { return registry_->Collect(); }}, tls_metrics_,
                                  *logger_);
  }

  UniqueFd Connect(const std::string& text, uint32_t from = INADDR_LOOPBACK) const {
    UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(from);
    EXPECT_EQ(bind(client.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(endpoint_->port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    send(client.get(), text.data(), text.size(), MSG_NOSIGNAL);
    return client;
  }
  // Reads until the end.
  static std::string Read(const UniqueFd& client) {
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = recv(client.get(), buffer, sizeof(buffer), 0)) > 0;) {
      text.append(buffer, static_cast<size_t>(got));
    }
    return text;
  }
  std::string Ask(const std::string& request) const { return Read(Connect(request)); }

  const std::shared_ptr<Logger> logger_ =
      std::make_shared<Logger>(Logger::Options(), std::make_shared<spdlog::sinks::null_sink_mt>());
  std::atomic<bool> ready_{true};
  std::atomic<const char*> ailment_{nullptr};
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  TlsMetrics tls_metrics_{*registry_};
  std::unique_ptr<MetricsEndpoint> endpoint_;
};

TEST_F(MetricsEndpointTest, AnswersEveryRequestWithTheRightStatus) {
  ASSERT_NE(endpoint_, nullptr);
  const std::string answer = Ask("GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_NE(answer.find("Content-Type: text/plain; version=0.0.4"), std::string::npos);
  EXPECT_TRUE(answer.ends_with("# TYPE attend_answer gauge\nattend_answer 42\n")) << answer;
  const size_t body = answer.find("\r\n\r\n") + 4;
  EXPECT_NE(answer.find("Content-Length: " + std::to_string(answer.size() - body) + "\r\n"),
            std::string::npos);
  const std::string head = Ask("HEAD /metrics HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n")) << head;
  EXPECT_TRUE(Ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
  EXPECT_TRUE(Ask("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
  EXPECT_TRUE(Ask("\r\n\r\n").starts_with("HTTP/1.1 405 "));
}

TEST_F(MetricsEndpointTest, ProbesTellOnlyLivenessAndReadiness) {
  ASSERT_NE(endpoint_, nullptr);
  const std::string alive = Ask("GET /healthz HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(alive.starts_with("HTTP/1.1 200 OK\r\n") && alive.ends_with("\r\n\r\nok\n")) << alive;
  EXPECT_EQ(Ask("GET /readyz HTTP/1.1\r\n\r\n"), alive);
  ready_ = false;
  const std::string unready = Ask("GET /readyz?verbose HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(unready.starts_with("HTTP/1.1 503 ") && unready.ends_with("\r\n\r\nnot ready\n"))
      << unready;
  EXPECT_EQ(Ask("GET /healthz HTTP/1.1\r\n\r\n"), alive);
  ailment_ = "all devices are lost\n";
  const std::string lost = Ask("GET /healthz HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(lost.starts_with("HTTP/1.1 503 ") && lost.ends_with("\r\n\r\nall devices are lost\n"))
      << lost;
}

TEST_F(MetricsEndpointTest, IncompleteRequestsDoNotBlockScrapes) {
  ASSERT_NE(endpoint_, nullptr);
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 3 * MetricsEndpoint::kConnectionsMax; ++i) {
    slow.push_back(Connect("GET /metrics HT"));
  }
  EXPECT_NE(Ask("GET /metrics HTTP/1.1\r\n\r\n").find("attend_answer 42"), std::string::npos);
  EXPECT_EQ(Read(slow[0]), "") << "the oldest have made room";
}

TEST_F(MetricsEndpointTest, ConnectionsOfOneAddressDoNotBlockOthers) {
  ASSERT_NE(endpoint_, nullptr);
  const UniqueFd scrape = Connect("GET /metrics HT");
  // More connections than allowed, while the scrape has not sent its request yet.
  std::vector<UniqueFd> flood;
  for (int i = 0; i < 2 * MetricsEndpoint::kConnectionsMax; ++i) {
    flood.push_back(Connect("GET ", INADDR_LOOPBACK + 1));
  }
  EXPECT_EQ(Read(flood[0]), "") << "it has made room for its like";
  const std::string rest = "TP/1.1\r\n\r\n";
  send(scrape.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
  EXPECT_NE(Read(scrape).find("attend_answer 42"), std::string::npos);
}

TEST_F(MetricsEndpointTest, RequestsAreBounded) {
  ASSERT_NE(endpoint_, nullptr);
  EXPECT_TRUE(
      Ask("GET /metrics HTTP/1.1\r\nX: " + std::string(8192, 'x')).starts_with("HTTP/1.1 431 "));
}

TEST_F(MetricsEndpointTest, ATakenPortIsReportedInOneLine) {
  ASSERT_NE(endpoint_, nullptr);
  const std::string address = "127.0.0.1:" + std::to_string(endpoint_->port());
  EXPECT_EQ(Start(address).status().message(),
            "metrics-listen " + address + " cannot be bound: Address already in use");
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// A server behind a slow network: every byte is delayed.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/client.h"
#include "client/tool/call_spec.h"
#include "tests/client/support/fake_server.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using std::chrono::milliseconds;

int Loopback(int port, sockaddr_in* address) {
  *address = {};
  address->sin_family = AF_INET;
  address->sin_port = htons(static_cast<uint16_t>(port));
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

// Passes bytes between clients and the server at `target`, delayed by at least `delay` in each
// direction. For small messages: the thread that forwards them blocks on nothing else.
class SlowNetwork {
 public:
  SlowNetwork(const std::string& target, milliseconds delay)
      : target_port_(std::atoi(target.substr(target.rfind(':') + 1).c_str())), delay_(delay) {
    sockaddr_in here;
    listener_ = Loopback(0, &here);
    socklen_t size = sizeof(here);
    auto* const generic = reinterpret_cast<sockaddr*>(&here);
    EXPECT_EQ(bind(listener_, generic, size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    EXPECT_EQ(getsockname(listener_, generic, &size), 0);
    address_ = "127.0.0.1:" + std::to_string(ntohs(here.sin_port));
    thread_ = std::thread([this] { Accept(); });
  }
  // Destroyed after its clients and the server: their ends end the connections.
  ~SlowNetwork() {
    shutdown(listener_, SHUT_RDWR);  // accept() returns
    thread_.join();
    close(listener_);
  }

  const std::string& address() const { return address_; }

 private:
  void Accept() {
    std::vector<std::thread> connections;
    for (int client; (client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      sockaddr_in there;
      const int server = Loopback(target_port_, &there);
      EXPECT_EQ(connect(server, reinterpret_cast<sockaddr*>(&there), sizeof(there)), 0);
      connections.emplace_back([this, client, server] { Relay(client, server); });
    }
    for (std::thread& each : connections) each.join();
  }

  void Relay(int client, int server) const {
    std::array<pollfd, 2> ends = {{{client, POLLIN, 0}, {server, POLLIN, 0}}};
    for (bool open = true; open;) {
      if (poll(ends.data(), ends.size(), -1) <= 0) break;
      std::this_thread::sleep_for(delay_);
      for (size_t from = 0; from < ends.size(); ++from) {
        if (ends[from].revents != 0) open &= Pass(ends[from].fd, ends[1 - from].fd);
      }
    }
    close(client);
    close(server);
  }

  static bool Pass(int from, int to) {
    std::array<char, 65536> bytes;
    const ssize_t count = recv(from, bytes.data(), bytes.size(), 0);
    if (count <= 0) return false;
    for (ssize_t at = 0; at < count;) {
      const ssize_t sent =
          send(to, bytes.data() + at, static_cast<size_t>(count - at), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += sent;
    }
    return true;
  }

  const int target_port_;
  const milliseconds delay_;
  int listener_ = -1;
  std::string address_;
  std::thread thread_;
};

// The first call waits for its connection, a few round trips here, without being retried.
TEST(FarServer, ASlowConnectionNeedsNoRetry) {
  ATTEND_FRESH_SEED(seed);
  FakeServer server;
  SlowNetwork network(server.address(), milliseconds(250));
  ClientOptions options;
  options.server = network.address();
  options.retry.attempts_max = 1;
  {
    Result<std::unique_ptr<Client>> client = Client::Make(options);
    ASSERT_TRUE(client.ok()) << client.status().ToString();
    CallOptions patient;
    patient.timeout = std::chrono::seconds(60);  // ends a test that hangs
    const Result<AttentionResult> result =
        (*client)->Call(*MakeRandomCall(*ParseCallSpec("B1,H1,L4,D8"), seed), patient);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
  }
  server.Stop();
}

}  // namespace
}  // namespace attend::client

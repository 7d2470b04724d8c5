// SPDX-License-Identifier: Apache-2.0
//
// A listener on a port of 127.0.0.1, and clients of it. Sockets that it hands over stay open until
// a test closes them.

#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <spdlog/sinks/null_sink.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/net/listener.h"
#include "server/net/tcp_listener.h"
#include "tests/kernels/support/manual_clock.h"

namespace attend::test {

inline UniqueFd ConnectTo(int port, const char* text = "") {
  UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  send(client.get(), text, std::strlen(text), MSG_NOSIGNAL);  // it may have been closed meanwhile
  return client;
}

// Waits for the server to close; nothing is ever sent to these clients.
inline void ExpectClosed(const UniqueFd& client) {
  pollfd polled{client.get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1) << "still open";
  char byte;
  EXPECT_LE(recv(client.get(), &byte, 1, MSG_DONTWAIT), 0);
}

class ListenerFixture : public ::testing::Test {
 protected:
  void Start(int64_t connections, int64_t per_peer) {
    Result<TcpListeners> tcp = ListenTcp("127.0.0.1:0");
    ASSERT_TRUE(tcp.ok()) << tcp.status().message();
    tcp_ = std::move(*tcp);
    Listener::Callbacks callbacks;
    callbacks.take = [this](int socket) {
      const std::lock_guard lock(mutex_);
      taken_.emplace_back(socket);
      changed_.notify_all();
      if (refusing_) taken_.back().Reset();
      if (refusing_) return std::shared_ptr<ConnectionUse>();
      const auto use = std::make_shared<ConnectionUse>(socket);
      use->spoke = !silent_;
      if (!uses_.empty()) use->marks = uses_[taken_.size() - 1].marks;
      return handed_.emplace_back(use);
    };
    callbacks.end = [this](const ConnectionUse& use, ConnectionRefusal reason) {
      const std::lock_guard lock(mutex_);
      reasons_.push_back(reason);
      use.WhileOpen([this](int socket) {
        shutdown(socket, SHUT_RDWR);
        ended_.push_back(socket);
      });
      changed_.notify_all();
    };
    callbacks.changed = [this](bool accepting) {
      const std::lock_guard lock(mutex_);
      accepting_.push_back(accepting);
      changed_.notify_all();
    };
    Result<std::unique_ptr<Listener>> listener =
        Listener::Start({{connections, per_peer}, std::chrono::seconds(60)},
                        {tcp_.sockets[0].get()}, callbacks, metrics_, logger_, clock_);
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(*listener);
  }
  // Waits until the n-th connection is handed over.
  int Taken(size_t n) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(30), [&] { return taken_.size() >= n; }));
    return taken_.size() < n ? -1 : taken_[n - 1].get();
  }
  // The next connections are unauthenticated.
  void ExpectStrangers(int number) {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < number; ++i) uses_.emplace_back();
  }
  // Waits until the n-th connection is ended. Returns the order in which it was accepted.
  size_t Ended(size_t n) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(30), [&] { return ended_.size() >= n; }));
    if (ended_.size() < n) return 0;
    const auto taken = std::find_if(taken_.begin(), taken_.end(),
                                    [&](const UniqueFd& fd) { return fd.get() == ended_[n - 1]; });
    return static_cast<size_t>(taken - taken_.begin()) + 1;
  }
  bool CountsAcceptErrors(int errors) const {
    const std::string text = prometheus::TextSerializer().Serialize(metrics_.registry()->Collect());
    const std::string sample = "\nattend_accept_errors_total " + std::to_string(errors) + "\n";
    return text.find(sample) != std::string::npos;
  }
  void CloseTaken(size_t n) {
    const std::lock_guard lock(mutex_);
    handed_[n - 1]->End();
    taken_[n - 1].Reset();
  }
  // Advances time until the listener reports the text.
  void WaitForAccepting(bool accepting) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::unique_lock lock(mutex_);
    while (accepting_.empty() || accepting_.back() != accepting) {
      ASSERT_LT(std::chrono::steady_clock::now(), until);
      clock_.Advance(std::chrono::milliseconds(100));  // the time that it rests
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
  }

  struct Use {
    std::shared_ptr<ConnectionMarks> marks = std::make_shared<ConnectionMarks>();
  };

  Logger logger_{{}, std::make_shared<spdlog::sinks::null_sink_mt>()};
  Metrics metrics_{"test"};
  ManualClock clock_;
  TcpListeners tcp_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UniqueFd> taken_;
  std::vector<std::shared_ptr<ConnectionUse>> handed_;
  std::vector<int> ended_;
  std::vector<ConnectionRefusal> reasons_;  // of those
  bool refusing_ = false;                   // handed-over sockets are closed
  std::atomic<bool> silent_ = false;        // no frame comes on the next connections
  std::vector<Use> uses_;                   // by order of acceptance
  std::vector<bool> accepting_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// A transport with a few methods, and clients connected by socket pairs.

#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/transport/http2_transport.h"
#include "tests/server/support/http2_client.h"

namespace attend {

// Counts the outcomes of the calls of TestMethods.
struct CallCounts {
  std::atomic<int64_t> begun{0}, cancelled{0}, done{0}, half_closed{0}, messages{0};
  Mutex mutex;
  std::vector<class TestCall*> together ATTEND_GUARDED_BY(mutex);  // since the last OnTaken
};

// A call that echoes messages until its client is done. `/later`: on its own thread; `/refused`:
// ends at once; `/held`: reads nothing and ends when it is cancelled; `/deaf`: ends with the first
// message; `/big`: answers one message with a large one, and ends at once; `/flood`: answers with
// as many messages as are read; `/together`: answers with the number of such messages that came at
// once; `/one`: fails once its client is done.
class TestCall final : public CallHandler {
 public:
  static constexpr int kBigBytes = 400000;

  TestCall(ServerCall& call, CallCounts& counts) : call_(call), counts_(counts) {
    counts_.begun.fetch_add(1);
    if (const auto said = call_.metadata().Find("say-bin")) {
      call_.AddHeader("said-bin", *said);
    }
    if (call_.path() == "/refused") {
      End(Status(Code::kPermissionDenied, "not \xc3\xa9 you"));
    } else if (call_.path() == "/flood") {
      Flood();
    } else if (call_.path() != "/held") {
      call_.Read();
    }
  }

  void OnMessage(InMessage message) override {
    counts_.messages.fetch_add(1);
    if (call_.path() == "/deaf") return End(Status(Code::kOutOfRange, "enough"));
    if (call_.path() == "/together") {
      const MutexLock lock(counts_.mutex);
      return counts_.together.push_back(this);
    }
    if (call_.path() == "/big") {
      call_.Write(OutMessage::Of(std::string(kBigBytes, 'b')));
      return End(Status());
    }
    std::string answer = message.Text();
    if (call_.path() != "/later") return call_.Write(OutMessage::Of(std::move(answer)));
    if (thread_.joinable()) thread_.join();
    thread_ =
        std::thread([this, answer = std::move(answer)] { call_.Write(OutMessage::Of(answer)); });
  }
  void AnswerTogether(size_t count) { call_.Write(OutMessage::Of(std::to_string(count))); }
  void OnHalfClose() override {
    counts_.half_closed.fetch_add(1);
    if (call_.path() == "/flood") return;
    if (call_.path() == "/one") return End(InvalidArgument("the call has no message"));
    End(call_.cancelled() ? Cancelled() : Status());
  }
  void OnWritten(bool ok) override {
    if (!ok) End(Cancelled());
    if (ended_) return;
    call_.path() == "/flood" ? Flood() : call_.Read();
  }
  void OnCancel() override {
    counts_.cancelled.fetch_add(1);
    if (thread_.joinable()) thread_.join();
    if (call_.path() == "/held" || call_.path() == "/flood") End(Cancelled());
  }
  void OnDone() override {
    if (thread_.joinable()) thread_.join();
    counts_.done.fetch_add(1);
    delete this;
  }

 private:
  static Status Cancelled() { return Status(Code::kCancelled, "cancelled"); }
  void Flood() { call_.Write(OutMessage::Of(std::string(50000, 'f'))); }
  void End(const Status& status) {
    if (std::exchange(ended_, true)) return;
    CallEnd end{status, {}};
    end.trailers.Add("grpc-status-details-bin", std::string("\0details", 8));
    call_.Finish(std::move(end));
  }

  ServerCall& call_;
  CallCounts& counts_;
  bool ended_ = false;
  std::thread thread_;
};

class TestMethods final : public CallMethods {
 public:
  MessageBound MessageBoundOf(std::string_view) const override { return {1 << 20, "by a test"}; }
  CallHandler* Begin(ServerCall& call) override { return new TestCall(call, counts); }
  void OnTaken() override {
    std::vector<TestCall*> all;
    {
      const MutexLock lock(counts.mutex);
      all.swap(counts.together);
    }
    for (TestCall* const call : all) call->AnswerTogether(all.size());
  }

  CallCounts counts;
};

// Waits until it is true, for at most a minute.
inline bool Eventually(const std::function<bool()>& is) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!is()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A client and its end of a socket pair.
struct ConnectedClient {
  UniqueFd socket;
  std::unique_ptr<Http2Client> client = std::make_unique<Http2Client>();
  bool ended = false;  // by the server

  Http2Client* operator->() { return client.get(); }
  void Write() {
    std::string output = client->Output();
    for (std::string_view left = output; !left.empty();) {
      const ssize_t bytes = send(socket.get(), left.data(), left.size(), MSG_NOSIGNAL);
      if (bytes <= 0) return;
      left.remove_prefix(static_cast<size_t>(bytes));
    }
  }
  // Exchanges bytes with the server until it is true. False: not within a minute.
  bool Until(const std::function<bool()>& is) {
    return Eventually([&] {
      Write();
      pollfd one{socket.get(), POLLIN, 0};
      if (is()) return true;
      if (poll(&one, 1, 1) <= 0) return false;
      std::array<char, 65536> buffer;
      const ssize_t bytes = recv(socket.get(), buffer.data(), buffer.size(), 0);
      ended |= bytes <= 0;
      if (bytes > 0) client->Receive({buffer.data(), static_cast<size_t>(bytes)});
      return is();
    });
  }
  bool UntilClosed(int32_t id) {
    return Until([&] { return client->answer(id).closed; });
  }
};

// Allows this many open calls, and counts. Its connection may end after the test's body.
struct CountingGuard final : ConnectionGuard {
  struct Counts {
    std::atomic<int64_t> open{0}, bytes{0}, kept{0}, ended{0}, failed{0}, stalled{0}, spoke{0},
        silent{0};
  };
  CountingGuard(std::shared_ptr<Counts> its_counts, int64_t its_most)
      : shared(std::move(its_counts)), counts(*shared), most(its_most) {}
  Status OpenCall() override {
    if (counts.open.load() >= most) return ResourceExhausted("too many calls");
    counts.open.fetch_add(1);
    return Status();
  }
  void CloseCall() override { counts.open.fetch_sub(1); }
  void OnFirstFrame() override { counts.spoke.fetch_add(1); }
  void OnMessageBytes(int64_t bytes) override { counts.bytes.fetch_add(bytes); }
  void OnKept(int64_t bytes) override { counts.kept.fetch_add(bytes); }
  void OnEnd(const Status& why) override {
    counts.ended.fetch_add(1);
    counts.failed.fetch_add(why.ok() ? 0 : 1);
    counts.stalled.fetch_add(why.code() == Code::kDeadlineExceeded ? 1 : 0);
    counts.silent.fetch_add(why.code() == Code::kUnavailable ? 1 : 0);
  }

  const std::shared_ptr<Counts> shared;
  Counts& counts;
  const int64_t most;
};

class TransportFixture : public ::testing::Test {
 protected:
  void Start() {
    Result<std::unique_ptr<Http2Transport>> transport =
        Http2Transport::Start(options_, methods_, clock_);
    ASSERT_TRUE(transport.ok());
    transport_ = std::move(*transport);
  }
  ConnectedClient Connect(std::unique_ptr<ConnectionGuard> guard = nullptr) {
    if (transport_ == nullptr) Start();
    std::array<int, 2> pair{-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()), 0);
    UniqueFd ours(pair[0]);
    EXPECT_EQ(fcntl(ours.get(), F_SETFL, O_NONBLOCK), 0);
    transport_->Serve(std::make_unique<PlainChannel>(std::move(ours)), {.address = "test:1"},
                      std::move(guard));
    ConnectedClient client;
    client.socket.Reset(pair[1]);
    return client;
  }
  bool AllDone() {
    return Eventually([&] {
      return methods_.counts.done.load() == methods_.counts.begun.load() &&
             transport_->CountCalls() == 0;
    });
  }

  SteadyClock clock_;
  TestMethods methods_;
  Http2Transport::Options options_;
  std::unique_ptr<Http2Transport> transport_;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/transport/http2_transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/support/transport_fixture.h"

namespace attend {
namespace {

class TransportTest : public TransportFixture {};

TEST_F(TransportTest, ServesManyConnectionsOnManyLoops) {
  options_.loops = 4;
  Start();
  constexpr int kThreads = 4, kConnections = 4, kCalls = 50;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int connection = 0; connection < kConnections; ++connection) {
        ConnectedClient client = Connect();
        std::vector<int32_t> ids;
        for (int call = 0; call < kCalls; ++call) {
          ids.push_back(client->Begin(call % 2 == 0 ? "/echo" : "/later"));
          client->SendMessage(ids.back(), std::to_string(call));
        }
        for (const int32_t id : ids) {
          ASSERT_TRUE(client.UntilClosed(id));
          ASSERT_EQ(client->answer(id).Status(), 0);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(AllDone());
  EXPECT_EQ(methods_.counts.begun.load(), kThreads * kConnections * kCalls);
  EXPECT_TRUE(Eventually([&] { return transport_->CountConnections() == 0; }));
}

TEST_F(TransportTest, EndsWithOpenCalls) {
  for (int round = 0; round < 10; ++round) {
    Start();
    std::vector<ConnectedClient> clients;
    for (const char* const path : {"/echo", "/later", "/held", "/flood"}) {
      clients.push_back(Connect());
      for (int i = 0; i < 5; ++i) {
        clients.back()->SendMessage(clients.back()->Begin(path), "x", i % 2 == 0);
      }
      clients.back().Write();
    }
    if (round % 2 == 0) Eventually([&] { return methods_.counts.begun.load() > round; });
    transport_.reset();
    EXPECT_EQ(methods_.counts.done.load(), methods_.counts.begun.load());
  }
}

TEST_F(TransportTest, ADrainLosesNoCalls) {
  ConnectedClient client = Connect();
  const int32_t id = client->Begin("/echo");
  client->SendMessage(id, "before", false);
  ASSERT_TRUE(client.Until([&] { return client->answer(id).Messages().size() == 1; }));
  transport_->Drain();
  ASSERT_TRUE(client.Until([&] { return client->goaways().size() == 2; }));
  client->SendMessage(id, "after", true);
  ASSERT_TRUE(client.UntilClosed(id));
  EXPECT_EQ(client->answer(id).Messages().size(), 2u);
  EXPECT_TRUE(client.Until([&] { return client.ended; }));
  EXPECT_TRUE(Eventually([&] { return transport_->CountConnections() == 0; }));
}

TEST_F(TransportTest, TellsCallsWhenAReadIsProcessed) {
  ConnectedClient client = Connect();
  std::vector<int32_t> ids;
  for (int i = 0; i < 10; ++i) {
    ids.push_back(client->Begin("/together"));
    client->SendMessage(ids.back(), "x");
  }
  client.Write();  // one read by the server
  for (const int32_t id : ids) {
    ASSERT_TRUE(client.UntilClosed(id));
    EXPECT_EQ(client->answer(id).Messages(), std::vector<std::string>{"10"});
  }
}

TEST_F(TransportTest, DrainsIdleAndOldConnections) {
  options_.connection.idle_timeout = std::chrono::milliseconds(10);
  options_.connection.drain_timeout = std::chrono::milliseconds(10);
  ConnectedClient idle = Connect();
  EXPECT_TRUE(idle.Until([&] { return idle.ended; }));
  EXPECT_GE(idle->goaways().size(), 1u);  // without calls it gets only one
  options_.connection.idle_timeout = std::chrono::hours(1);
  options_.connection.age_max = std::chrono::milliseconds(10);
  Start();
  ConnectedClient old = Connect();
  const int32_t id = old->Begin("/echo");
  ASSERT_TRUE(old.Until([&] { return old->goaways().size() == 2; }));
  old->SendMessage(id, "still");
  ASSERT_TRUE(old.UntilClosed(id));
  EXPECT_EQ(old->answer(id).Status(), 0);
  EXPECT_TRUE(old.Until([&] { return old.ended; }));
}

TEST_F(TransportTest, SpreadsTheMaximalAgesOfConnections) {
  options_.connection.age_max = std::chrono::seconds(1);
  options_.connection.drain_timeout = std::chrono::milliseconds(1);
  const TimePoint began = clock_.Now();
  std::vector<ConnectedClient> clients;
  for (int i = 0; i < 24; ++i) clients.push_back(Connect());
  EXPECT_TRUE(Eventually([&] { return transport_->CountConnections() < 24; }));
  const TimePoint first = clock_.Now();
  EXPECT_GE(first - began, std::chrono::milliseconds(900));
  EXPECT_TRUE(Eventually([&] { return transport_->CountConnections() == 0; }));
  EXPECT_GE(clock_.Now() - first, std::chrono::milliseconds(40));
}

TEST_F(TransportTest, ClosesConnectionsThatFlood) {
  ConnectedClient client = Connect();
  for (int i = 0; i < 1000; ++i) client->Ping();
  EXPECT_TRUE(client.Until([&] { return client.ended; }));
  EXPECT_EQ(client->goaways().size(), 1u);
}

TEST_F(TransportTest, RefusesCallsBeyondAConnectionsLimit) {
  options_.connection.calls_max = 10;
  ConnectedClient client = Connect();
  std::vector<int32_t> ids;
  for (int i = 0; i < 11; ++i) ids.push_back(client->Begin("/held"));
  ASSERT_TRUE(client.UntilClosed(ids.back()));
  EXPECT_EQ(client->answer(ids.back()).error, uint32_t{NGHTTP2_REFUSED_STREAM});
}

// Blocks its loop, from the first call until it is released.
struct StandStill {
  struct Guard final : ConnectionGuard {
    explicit Guard(StandStill& its_stand) : stand(its_stand) {}
    Status OpenCall() override {
      stand.stands.store(true);
      while (stand.stands.load()) std::this_thread::yield();
      return Status();
    }
    void CloseCall() override {}
    void OnMessageBytes(int64_t) override {}
    void OnKept(int64_t) override {}
    void OnEnd(const Status&) override {}

    StandStill& stand;
  };
  std::atomic<bool> stands{false};
};

TEST_F(TransportTest, DetectsABlockedLoop) {
  options_.loops = 2;
  Start();
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Eventually([&] { return transport_->StoodStill() == Duration::zero(); }));
  }
  StandStill stand;
  ConnectedClient client = Connect(std::make_unique<StandStill::Guard>(stand));
  client->Begin("/held");
  client.Write();
  ASSERT_TRUE(Eventually([&] { return stand.stands.load(); }));
  EXPECT_TRUE(Eventually([&] { return transport_->StoodStill() > std::chrono::milliseconds(5); }));
  stand.stands.store(false);
  EXPECT_TRUE(Eventually([&] { return transport_->StoodStill() == Duration::zero(); }));
}

TEST_F(TransportTest, ConnectionsWithLargeMessagesShareTheirWindows) {
  const std::string message(size_t{1} << 20, 'm');
  constexpr int64_t kAlone = int64_t{8} << 20, kLeast = int64_t{1} << 20;
  // As many bytes as the largest window, so that the client has to be granted what it may send.
  const auto send = [&](ConnectedClient& client) {
    for (int i = 0; i < 8; ++i) {
      const int32_t id = client->Begin("/echo");
      client->SendMessage(id, message);
      ASSERT_TRUE(client.UntilClosed(id));
    }
  };
  ConnectedClient client = Connect();
  const int32_t small = client->Begin("/echo");
  client->SendMessage(small, "s");
  ASSERT_TRUE(client.UntilClosed(small));
  EXPECT_LE(client->window_bytes(), kLeast);
  ASSERT_NO_FATAL_FAILURE(send(client));
  EXPECT_GT(client->window_bytes(), kAlone / 2);
  EXPECT_LE(client->window_bytes(), kAlone);
  std::vector<ConnectedClient> others;
  const auto open = [&](const std::string& text) {
    for (int i = 0; i < 15; ++i) {
      others.push_back(Connect());
      others.back()->Send(others.back()->Begin("/echo"), text);
      others.back().Write();
    }
    ASSERT_TRUE(Eventually([&] { return transport_->CountCalls() == 15; }));
  };
  ASSERT_NO_FATAL_FAILURE(open(Framed("s")));
  ASSERT_NO_FATAL_FAILURE(send(client));
  EXPECT_GT(client->window_bytes(), kAlone / 2);
  others.clear();
  ASSERT_TRUE(Eventually([&] { return transport_->CountCalls() == 0; }));
  ASSERT_NO_FATAL_FAILURE(open(Framed(message).substr(0, 1000)));
  ASSERT_NO_FATAL_FAILURE(send(client));
  EXPECT_LE(client->window_bytes(), kLeast);
  others.clear();
  ASSERT_TRUE(Eventually([&] { return transport_->CountCalls() == 0; }));
  ASSERT_NO_FATAL_FAILURE(send(client));
  EXPECT_GT(client->window_bytes(), kAlone / 2);
}

class BlocksTest : public TransportTest {
 protected:
  static constexpr int64_t kBlocks = 16;

  BlocksTest() { options_.blocks = &pool_; }
  ~BlocksTest() override { transport_.reset(); }

  int64_t CountBlocksInUse() {
    std::vector<BlockPool::Block> unused;
    do {
      unused.push_back(pool_.Take());
    } while (unused.back().get() >= pool_.begin() &&
             unused.back().get() < pool_.begin() + pool_.bytes());
    return kBlocks + 1 - std::ssize(unused);
  }
  // Waits until all that the client has sent has been read.
  void UntilRead(ConnectedClient& client) {
    const int32_t id = client->Begin("/echo");
    client->SendMessage(id, "last");
    ASSERT_TRUE(client.UntilClosed(id));
  }

  BlockPool pool_{kBlocks * static_cast<int64_t>(BlockPool::kBlockBytes)};
  const std::string text_ = [] {
    std::string text;
    std::minstd_rand random(std::random_device{}());
    while (text.size() < 1000000) text += static_cast<char>(random());
    return text;
  }();
};

TEST_F(BlocksTest, BlocksAreInUseAsLongAsTheirMessages) {
  const auto shared = std::make_shared<CountingGuard::Counts>();
  const CountingGuard::Counts& counts = *shared;
  ConnectedClient client = Connect(std::make_unique<CountingGuard>(shared, 3));
  for (const bool whole : {true, false}) {
    const int32_t id = client->Begin("/echo");
    client->Send(id, Framed(text_).substr(0, 700000));
    // The first read goes to the loop's buffer.
    ASSERT_TRUE(client.Until([&] { return CountBlocksInUse() >= 2; }));
    // The message, and the block of the next read.
    EXPECT_TRUE(Eventually([&] {
      return counts.kept.load() >= 699995 + static_cast<int64_t>(BlockPool::kBlockBytes);
    })) << counts.kept.load();
    if (whole) {
      client->Send(id, Framed(text_).substr(700000), true);
      ASSERT_TRUE(client.UntilClosed(id));
      EXPECT_TRUE(client->answer(id).Messages() == std::vector<std::string>{text_});
    } else {
      client->Reset(id);
      client.Write();
    }
    EXPECT_TRUE(Eventually([&] { return CountBlocksInUse() == 0; }));
    EXPECT_TRUE(Eventually([&] { return counts.kept.load() == 0; })) << counts.kept.load();
  }
}

TEST_F(BlocksTest, BlocksAreGivenUpWhenMessagesKeepLittleOfThem) {
  ConnectedClient client = Connect();
  for (const bool wastes : {true, false}) {
    UntilRead(client);  // and it knows the windows
    const int32_t id = client->Begin("/echo");
    const std::string framed = Framed(text_);
    std::string_view left = std::string_view(framed).substr(0, framed.size() - 1);
    // Frames of 1000 bytes are copied, those of 3000 stay in their block.
    for (size_t i = 0; !left.empty(); ++i) {
      const std::string_view frame = left.substr(0, wastes && i % 20 != 0 ? 1000 : 3000);
      left.remove_prefix(frame.size());
      client->Send(id, frame);
      client.Write();
    }
    UntilRead(client);
    const int64_t in_use = CountBlocksInUse();
    EXPECT_TRUE(wastes ? in_use <= 1 : in_use >= 2) << in_use;
    client->Send(id, std::string_view(framed).substr(framed.size() - 1), true);
    ASSERT_TRUE(client.UntilClosed(id));
    EXPECT_TRUE(client->answer(id).Messages() == std::vector<std::string>{text_});
    EXPECT_TRUE(Eventually([&] { return CountBlocksInUse() == 0; }));
  }
}

}  // namespace
}  // namespace attend

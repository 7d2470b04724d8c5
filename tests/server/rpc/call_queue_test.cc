// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::milliseconds;

// A queue whose threads start when the gate opens.
class CallQueueTest : public ::testing::Test {
 protected:
  void Make(int threads, TenantWeights weights) {
    workers_.emplace("test", threads);
    queue_.emplace(*workers_, weights, clock_);
    for (int n = 0; n < threads; ++n) workers_->Post([opened = opened_] { opened.wait(); });
  }
  // A call that takes `ms` and appends its tenant's letter to `order_`.
  void Post(int tenant, int ms, int64_t bytes = 10) {
    const Status posted = queue_->Post(tenant, bytes, [this, tenant, ms] {
      clock_.Advance(milliseconds(ms));
      order_ += static_cast<char>('a' + tenant);
    });
    ASSERT_TRUE(posted.ok()) << posted.message();
  }
  // Runs everything that was posted.
  std::string Order() {
    gate_.set_value();
    workers_.reset();
    return order_;
  }

  test::ManualClock clock_;
  std::promise<void> gate_;
  std::shared_future<void> opened_ = gate_.get_future().share();
  std::optional<WorkerThreads> workers_;
  std::optional<CallQueue> queue_;
  std::string order_;  // on the only thread that runs calls
};

TEST_F(CallQueueTest, CallsOfOneTenantKeepTheirOrder) {
  Make(1, {1});
  std::string order;
  for (int n = 0; n < 10; ++n) {
    ASSERT_TRUE(queue_->Post(0, 0, [&order, n] { order += std::to_string(n); }).ok());
  }
  Order();
  EXPECT_EQ(order, "0123456789");
}

TEST_F(CallQueueTest, ATenantsBacklogDoesNotDelayAnother) {
  Make(1, {1, 1});
  for (int n = 0; n < 1000; ++n) Post(0, 5);
  for (int n = 0; n < 3; ++n) Post(1, 1);
  EXPECT_EQ(Order().substr(0, 6), "abbbaa");
}

TEST_F(CallQueueTest, TenantsShareTimeNotCalls) {
  Make(1, {1, 1});
  for (int n = 0; n < 8; ++n) Post(0, 40);
  for (int n = 0; n < 80; ++n) Post(1, 4);
  const std::string order = Order();
  // Ten calls of one tenant take as long as one of the other.
  for (int n = 0; n < 7; ++n) {
    const std::string part = order.substr(n * 11, 11);
    EXPECT_EQ(std::count(part.begin(), part.end(), 'a'), 1) << n << " " << order;
  }
}

TEST_F(CallQueueTest, SharesAreByWeight) {
  Make(1, {1, 3});
  for (int n = 0; n < 20; ++n) {
    Post(0, 10);
    Post(1, 10);
  }
  const std::string order = Order().substr(0, 20);
  EXPECT_NEAR(std::count(order.begin(), order.end(), 'b'), 15, 1) << order;
}

TEST_F(CallQueueTest, AnIdleTenantAccumulatesNoShare) {
  Make(1, {1, 1});
  for (int n = 0; n < 20; ++n) Post(0, 10);
  ASSERT_TRUE(queue_
                  ->Post(1, 0,
                         [this] {  // the other tenant has run once by now
                           for (int n = 0; n < 10; ++n) Post(1, 10);
                         })
                  .ok());
  const std::string order = Order().substr(0, 16);
  EXPECT_NEAR(std::count(order.begin(), order.end(), 'b'), 8, 1) << order;
}

TEST_F(CallQueueTest, OtherWorkTakesTurnsWithCalls) {
  Make(1, {1});
  for (int n = 0; n < 100; ++n) Post(0, 1);
  workers_->Post(
      5, [this](size_t) { order_ += '.'; }, [this] { order_ += '!'; });
  EXPECT_EQ(Order().substr(0, 11), "a.a.a.a.a.!");
}

TEST_F(CallQueueTest, CallsLeaveHalfOfTheThreadsToOtherWork) {
  Make(4, {1});
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  for (int n = 0; n < 8; ++n) ASSERT_TRUE(queue_->Post(0, 0, [ended] { ended.wait(); }).ok());
  gate_.set_value();
  std::promise<void> both;
  std::atomic<int> here{0};
  workers_->Post(
      2,
      [&here](size_t) {  // ends only if both parts run at the same time
        here.fetch_add(1);
        while (here.load() < 2) std::this_thread::yield();
      },
      [&both] { both.set_value(); });
  both.get_future().get();
  end.set_value();
  workers_.reset();
}

TEST_F(CallQueueTest, ATenantsWaitingCallsAreBounded) {
  Make(1, {1, 1});
  for (int64_t n = 0; n < CallQueue::kCallsMax; ++n) Post(0, 0);
  const Status refused = queue_->Post(0, 10, [this] { order_ += "!"; });
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_NE(refused.message().find("1024 of the tenant are waiting"), std::string::npos)
      << refused.message();
  Post(1, 0, CallQueue::kBytesMax - 5);
  EXPECT_EQ(queue_->Post(1, 6, [this] { order_ += "!"; }).code(), Code::kResourceExhausted);
  Post(1, 0, 5);
  const std::string order = Order();
  EXPECT_EQ(std::ssize(order), CallQueue::kCallsMax + 2);
  EXPECT_EQ(order.find('!'), std::string::npos);
}

TEST_F(CallQueueTest, ACallFreesItsPlaceWhenItBegins) {
  Make(1, {1});
  Post(0, 0, CallQueue::kBytesMax);
  Status posted;
  ASSERT_FALSE(queue_->Post(0, 1, [] {}).ok());
  gate_.set_value();
  do {
    posted = queue_->Post(0, 1, [this] { order_ += "late"; });
  } while (!posted.ok());
  workers_.reset();
  EXPECT_EQ(order_, "alate");
}

TEST_F(CallQueueTest, EveryCallRunsOnceUnderManyThreads) {
  Make(4, {1, 1, 2});
  gate_.set_value();
  std::atomic<int> calls{0};
  std::atomic<int> at_once{0};
  std::atomic<int> most{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int n = 0; n < 5000;) {
        const Status posted = queue_->Post(caller, 1, [&] {
          const int here = at_once.fetch_add(1) + 1;
          int before = most.load();
          while (here > before && !most.compare_exchange_weak(before, here)) {
          }
          calls.fetch_add(1);
          at_once.fetch_sub(1);
        });
        if (posted.ok()) ++n;
      }
    });
  }
  for (std::thread& each : callers) each.join();
  workers_.reset();
  EXPECT_EQ(calls.load(), 15000);
  EXPECT_LE(most.load(), 2) << "half of the threads";
}

}  // namespace
}  // namespace attend

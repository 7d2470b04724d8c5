// SPDX-License-Identifier: Apache-2.0

#include "server/transport/loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace attend {
namespace {

class Function final : public Loop::Task {
 public:
  explicit Function(std::function<void()> function) : function_(std::move(function)) {}
  void Run() override { function_(); }

 private:
  const std::function<void()> function_;
};

class Alarm final : public Loop::Timer {
 public:
  explicit Alarm(std::function<void()> function) : function_(std::move(function)) {}
  void OnTime() override { function_(); }

 private:
  const std::function<void()> function_;
};

std::unique_ptr<Loop> StartLoop(const Clock& clock) {
  Result<std::unique_ptr<Loop>> loop = Loop::Start("test-loop", clock);
  EXPECT_TRUE(loop.ok());
  return std::move(*loop);
}

// Runs on the loop's thread, and waits for it.
void RunOn(Loop& loop, std::function<void()> function) {
  std::atomic<bool> done{false};
  Function task([&] { function(); });
  Function last([&] { done.store(true); });
  loop.Post(task);
  loop.Post(last);
  while (!done.load()) std::this_thread::yield();
}

TEST(Loop, TasksRunInOrderOnTheLoopsThread) {
  const SteadyClock clock{};
  const std::unique_ptr<Loop> loop = StartLoop(clock);
  std::vector<int> order;
  Function first([&] {
    EXPECT_TRUE(loop->OnThread());
    order.push_back(1);
  });
  Function second([&] { order.push_back(2); });
  RunOn(*loop, [&] {
    loop->Post(first);
    loop->Post(second);
    loop->Post(first);  // it has been posted already
  });
  RunOn(*loop, [] {});
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_FALSE(loop->OnThread());
}

TEST(Loop, NoTaskIsLostUnderManyThreads) {
  const SteadyClock clock{};
  const std::unique_ptr<Loop> loop = StartLoop(clock);
  constexpr int kThreads = 4, kPosts = 5000;
  std::atomic<int> wanted{0}, seen{0};
  Function task([&] { seen.store(wanted.load()); });
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int post = 0; post < kPosts; ++post) {
        wanted.fetch_add(1);
        loop->Post(task);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (seen.load() != kThreads * kPosts) std::this_thread::yield();
}

TEST(Loop, ServesTimersWhenTheyAreDue) {
  const SteadyClock clock{};
  const std::unique_ptr<Loop> loop = StartLoop(clock);
  std::mt19937 random(std::random_device{}());
  constexpr int kTimers = 200;
  std::vector<std::unique_ptr<Alarm>> timers;
  std::vector<TimePoint> due(kTimers);
  std::vector<int> order;
  std::atomic<int> count{0};
  for (int i = 0; i < kTimers; ++i) {
    timers.push_back(std::make_unique<Alarm>([&, i] {
      EXPECT_GE(clock.Now(), due[i]);
      order.push_back(i);
      count.fetch_add(1);
    }));
  }
  const TimePoint now = clock.Now();
  RunOn(*loop, [&] {
    for (int i = 0; i < kTimers; ++i) {
      loop->Set(*timers[i], now + std::chrono::hours(1));
      due[i] = now + std::chrono::microseconds(random() % 20000);
      loop->Set(*timers[i], due[i]);
    }
    for (int i = 0; i < kTimers; i += 2) loop->Clear(*timers[i]);
  });
  while (count.load() < kTimers / 2) std::this_thread::yield();
  RunOn(*loop, [&] {
    EXPECT_EQ(order.size(), size_t{kTimers / 2});
    for (size_t i = 1; i < order.size(); ++i) EXPECT_LE(due[order[i - 1]], due[order[i]]);
    for (const auto& timer : timers) EXPECT_FALSE(timer->set());
  });
}

// Counts events of a descriptor, and asks to be told the end of each turn.
struct Watched final : Loop::Watcher, Loop::TurnEnd {
  explicit Watched(Loop& its_loop) : loop(its_loop) {}
  void OnEvents(uint32_t events) override {
    EXPECT_EQ(events, uint32_t{EPOLLIN});
    eventfd_t value;
    eventfd_read(fd.get(), &value);
    ++events_count;
    loop.AtTurnEnd(*this);
    loop.AtTurnEnd(*this);
  }
  void OnTurnEnd() override { turns.fetch_add(1); }

  Loop& loop;
  const UniqueFd fd{eventfd(0, EFD_NONBLOCK)};
  int events_count = 0;
  std::atomic<int> turns{0};
};

TEST(Loop, ReportsTheEndOfATurnOncePerRequest) {
  const SteadyClock clock{};
  const std::unique_ptr<Loop> loop = StartLoop(clock);
  Watched one(*loop), two(*loop);
  RunOn(*loop, [&] {
    ASSERT_TRUE(loop->Watch(one.fd.get(), EPOLLIN, one).ok());
    ASSERT_TRUE(loop->Watch(two.fd.get(), EPOLLIN, two).ok());
    EXPECT_FALSE(loop->Watch(-1, EPOLLIN, one).ok());
  });
  eventfd_write(one.fd.get(), 1);
  while (one.turns.load() < 1) std::this_thread::yield();
  RunOn(*loop, [&] {
    EXPECT_EQ(one.turns.load(), one.events_count);
    loop->AtTurnEnd(one);
    loop->AtTurnEnd(two);
    loop->Forget(one);
    loop->Unwatch(one.fd.get());
    loop->Unwatch(two.fd.get());
  });
  RunOn(*loop, [] {});
  EXPECT_EQ(one.turns.load(), 1);
  EXPECT_EQ(two.turns.load(), 1);
}

TEST(Loop, CountsItsTurns) {
  const SteadyClock clock{};
  const std::unique_ptr<Loop> loop = StartLoop(clock);
  RunOn(*loop, [] {});
  RunOn(*loop, [] {});
  EXPECT_GT(loop->turns(), 0);
}

}  // namespace
}  // namespace attend

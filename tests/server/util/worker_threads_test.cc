// SPDX-License-Identifier: Apache-2.0

#include "server/util/worker_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <string>
#include <thread>
#include <vector>

namespace attend {
namespace {

TEST(WorkerThreadsTest, EveryPartRunsOnceBeforeDone) {
  std::vector<int> calls(1000);
  std::promise<int> sum;
  WorkerThreads workers("test", 3);
  EXPECT_EQ(workers.size(), 3);
  workers.Post(
      calls.size(), [&](size_t part) { ++calls[part]; },
      [&] {  // sees what the parts have written
        int ones = 0;
        for (const int each : calls) ones += each == 1;
        sum.set_value(ones);
      });
  EXPECT_EQ(sum.get_future().get(), 1000);
}

TEST(WorkerThreadsTest, PartsOfAJobRunAtOnce) {
  std::atomic<int> here{0};
  WorkerThreads workers("test", 2);
  std::promise<void> met;
  workers.Post(
      2,
      [&](size_t) {  // ends only if both parts run at the same time
        here.fetch_add(1);
        while (here.load() < 2) std::this_thread::yield();
      },
      [&] { met.set_value(); });
  met.get_future().get();
}

TEST(WorkerThreadsTest, JobsTakeTurns) {
  std::string order;  // on the only thread
  std::promise<void> gate;
  {
    WorkerThreads workers("test", 0);
    EXPECT_EQ(workers.size(), 1) << "there is always one";
    workers.Post([opened = gate.get_future().share()] { opened.wait(); });
    workers.Post(
        3, [&](size_t part) { order += std::to_string(part); }, [&] { order += "a"; });
    workers.Post([&] { order += "b"; });
    workers.Post(2, [&](size_t part) { order += std::to_string(part); }, {});
    gate.set_value();
  }
  EXPECT_EQ(order, "0b0112a");
}

TEST(WorkerThreadsTest, JobsPostedByJobsRunBeforeTheEnd) {
  std::atomic<int> run{0};
  {
    WorkerThreads workers("test", 2);
    workers.Post([&] {
      workers.Post([&] {
        workers.Post([&] { ++run; });
        ++run;
      });
      ++run;
    });
  }
  EXPECT_EQ(run, 3);
}

}  // namespace
}  // namespace attend

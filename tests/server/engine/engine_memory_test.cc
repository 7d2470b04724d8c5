// SPDX-License-Identifier: Apache-2.0
//
// Allocations fail while a request is submitted, and while an accepted one runs and ends.

#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <new>
#include <thread>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "tests/kernels/support/counted_new.h"
#include "tests/server/support/engine_fixture.h"

namespace attend {
namespace {

constexpr int64_t kReserveBytes = int64_t{16} << 20;  // the server's
constexpr int64_t kRequests = 1000;

thread_local bool submits = false;

class EngineMemoryTest : public EngineTest {
 protected:
  struct Outcome {
    Status status;
    bool threw = false;
    bool reached = false;  // the allocation to fail was reached
  };

  // Submits with the N-th allocation failing.
  Outcome SubmitFailing(std::unique_ptr<Request>& request, int64_t nth) {
    Outcome outcome;
    const test::HeapFault fault(nth, [] { return submits; });
    std::thread([&] {  // a HeapFault spares the thread that made it
      submits = true;
      try {
        outcome.status = engine_->Submit(request);
      } catch (const std::bad_alloc&) {
        outcome.threw = true;
      }
      submits = false;
    })
        .join();
    outcome.reached = fault.reached();
    return outcome;
  }
  double Outstanding() { return engine_->Devices()[0].outstanding_batches; }
};

TEST_F(EngineMemoryTest, ARequestThatIsNotAcceptedLeavesNothingBehind) {
  options_.checker.places_max = 1;
  Start();
  HoldLane();
  int64_t thrown = 0;
  for (int64_t nth = 1;; ++nth) {
    auto request = NewRequest();
    const uint64_t id = request->id;
    request->deadline = clock_.Now() + std::chrono::hours(1);
    request->priority = static_cast<int32_t>(nth);  // the first request of this priority
    request->check = AnswerCheck::kAsked;
    const int64_t inflight = engine_->inflight();
    const double outstanding = Outstanding();
    const Outcome outcome = SubmitFailing(request, nth);
    if (outcome.threw) {
      ++thrown;
      ASSERT_NE(request, nullptr) << nth;
      ASSERT_EQ(engine_->inflight(), inflight) << nth;
      ASSERT_EQ(Outstanding(), outstanding) << nth;
      ASSERT_EQ(engine_->Devices()[0].queued, 0) << nth;
      continue;
    }
    // In particular, the checker's only place is free again.
    ASSERT_TRUE(outcome.status.ok()) << nth << ": " << outcome.status.ToString();
    ASSERT_EQ(request, nullptr);
    engine_->Cancel(id);
    ASSERT_EQ(collector_.WaitFor(id).status.code(), Code::kCancelled);
    if (!outcome.reached) break;
  }
  EXPECT_GT(thrown, 5) << "the faults met nothing";
}

// Allocates until nothing is left, as a request does before it is accepted. The process gets no
// more address space.
void TakeAllMemory() {
  std::vector<void*> taken;
  taken.reserve(1 << 20);
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
  if (pages == 0 || setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
  const OnNoMemory no_memory(OnNoMemory::kThrow);
  for (const size_t bytes : {32 << 10, 1 << 10, 48}) {
    try {
      while (taken.size() < taken.capacity()) taken.push_back(::operator new(bytes));
      _exit(3);
    } catch (const std::bad_alloc&) {
    }
  }
}

TEST_F(EngineMemoryTest, AnAcceptedRequestEndsWithoutMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(ATTEND_THREAD_SANITIZER)
  GTEST_SKIP() << "a sanitizer's own memory comes from the same address space";
#endif
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto end_all = [this] {
    mallopt(M_ARENA_MAX, 1);  // every arena reserves address space
    options_.worker.queue_requests_max = kRequests;
    options_.worker.batcher.batch_requests_max = 64;
    options_.memory_budget_bytes = 64 << 20;
    Start();
    HoldLane();
    for (int64_t i = 0; i < kRequests; ++i) MustSubmit(NewRequest());
    KeepMemoryReserve(kReserveBytes);
    TakeAllMemory();
    devices_[0]->Release();
    for (uint64_t id = 1; id <= last_id_; ++id) {
      if (!collector_.WaitFor(id).status.ok()) _exit(4);
    }
    _exit(MemoryIsShort() ? 0 : 5);
  };
  EXPECT_EXIT(end_all(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Spans reach a collector in batches. If it is slow, gone or refuses, spans are lost and counted,
// and callers never wait.

#include "server/trace/span_exporter.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <deque>
#include <memory>
#include <sstream>
#include <thread>
#include <vector>

#include "server/trace/tracer.h"
#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A collector with scripted answers.
class FakeSink final : public SpanSink {
 public:
  struct State {
    Mutex mutex;
    CondVar changed;
    std::deque<Result<PartialSuccess>> answers ATTEND_GUARDED_BY(mutex);  // then OK
    size_t messages ATTEND_GUARDED_BY(mutex) = 0;
    bool holds ATTEND_GUARDED_BY(mutex) = false;  // answers nothing
    bool cancelled ATTEND_GUARDED_BY(mutex) = false;
  };
  explicit FakeSink(std::shared_ptr<State> state) : state_(std::move(state)) {}

  Result<PartialSuccess> Send(std::span<const CallSpan>, Duration) override {
    const MutexLock lock(state_->mutex);
    ++state_->messages;
    state_->changed.NotifyAll();
    while (state_->holds && !state_->cancelled) state_->changed.Wait(state_->mutex);
    if (state_->cancelled) return Status(Code::kCancelled, "the end");
    if (state_->answers.empty()) return PartialSuccess();
    Result<PartialSuccess> answer = std::move(state_->answers.front());
    state_->answers.pop_front();
    return answer;
  }
  void Cancel() override {
    const MutexLock lock(state_->mutex);
    state_->cancelled = true;
    state_->changed.NotifyAll();
  }

 private:
  const std::shared_ptr<State> state_;
};

class SpanExporterTest : public ::testing::Test {
 protected:
  std::unique_ptr<SpanExporter> Make(SpanExporter::Options options = {}) {
    return std::make_unique<SpanExporter>(options, std::make_unique<FakeSink>(state_), logger_,
                                          clock_);
  }
  static CallSpan Call(uint64_t number, size_t phases = 2) {
    CallSpan call;
    call.own = {1, 2, number + 1, true};
    call.method = "/attend.v1.AttentionService/Attend";
    for (size_t n = 0; n < phases; ++n) call.AddPhase("queue", n + 1, {}, {});
    return call;
  }
  void Answer(Result<PartialSuccess> answer) {
    const MutexLock lock(state_->mutex);
    state_->answers.push_back(std::move(answer));
  }
  void Hold(bool holds) {
    const MutexLock lock(state_->mutex);
    state_->holds = holds;
    state_->changed.NotifyAll();
  }
  // Waits until this many messages were sent.
  void AwaitMessages(size_t count) {
    const MutexLock lock(state_->mutex);
    while (state_->messages < count) state_->changed.Wait(state_->mutex);
  }
  size_t messages() {
    const MutexLock lock(state_->mutex);
    return state_->messages;
  }

  const std::shared_ptr<FakeSink::State> state_ = std::make_shared<FakeSink::State>();
  test::ManualClock clock_;
  std::ostringstream log_;
  Logger logger_{Logger::Options(), std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)};
};

TEST_F(SpanExporterTest, AFullBatchIsSentAtOnceAndTheRestAfterTheInterval) {
  const auto exporter = Make({.batch_max = 4});
  for (uint64_t n = 0; n < 4; ++n) exporter->Offer(Call(n));
  AwaitMessages(1);
  exporter->Offer(Call(4));
  exporter->Flush(kNever);
  EXPECT_EQ(messages(), 2u);
  EXPECT_EQ(exporter->stats().exported, 15);
  exporter->Offer(Call(5));
  while (messages() < 3) {
    clock_.Advance(milliseconds(100));
    std::this_thread::yield();
  }
  exporter->Flush(kNever);
  EXPECT_EQ(exporter->stats().exported, 18);
  EXPECT_EQ(exporter->stats().dropped + exporter->stats().failed, 0);
}

TEST_F(SpanExporterTest, SpansBeyondTheQueueAreDropped) {
  Hold(true);
  const auto exporter = Make({.pending_max = 10, .batch_max = 10});
  for (uint64_t n = 0; n < 10; ++n) exporter->Offer(Call(n));
  AwaitMessages(1);  // which hangs
  for (uint64_t n = 0; n < 25; ++n) exporter->Offer(Call(n));
  EXPECT_EQ(exporter->stats().dropped, 15 * 3);
  Hold(false);
  exporter->Flush(kNever);
  EXPECT_EQ(exporter->stats().exported, 20 * 3);
  EXPECT_NE(log_.str().find("spans are lost"), std::string::npos);
  EXPECT_NE(log_.str().find("spans=45 error=\"they arrive faster"), std::string::npos)
      << log_.str();
}

TEST_F(SpanExporterTest, OnlyTransientErrorsAreRetriedAndFewTimes) {
  const auto exporter = Make({.batch_max = 1, .attempts_max = 3});
  Answer(Unavailable("gone"));
  Answer(Unavailable("gone"));
  exporter->Offer(Call(0));
  exporter->Flush(kNever);  // while stopping: without the pauses
  EXPECT_EQ(messages(), 3u);
  EXPECT_EQ(exporter->stats().exported, 3);
  for (int n = 0; n < 3; ++n) Answer(Unavailable("gone"));
  exporter->Offer(Call(1));
  exporter->Flush(kNever);
  EXPECT_EQ(messages(), 6u);
  EXPECT_EQ(exporter->stats().failed, 3);
  Answer(InvalidArgument("what is this"));
  exporter->Offer(Call(2));
  exporter->Flush(kNever);
  EXPECT_EQ(messages(), 7u);
  EXPECT_EQ(exporter->stats().failed, 6);
  EXPECT_NE(log_.str().find("spans are lost spans=3 error=\"UNAVAILABLE: gone\""),
            std::string::npos)
      << log_.str();
}

TEST_F(SpanExporterTest, ARetryWaitsForItsPause) {
  const auto exporter = Make({.batch_max = 1, .retry_wait = seconds(10)});
  Answer(Unavailable("gone"));
  exporter->Offer(Call(0));
  AwaitMessages(1);
  clock_.AwaitWaiter();
  EXPECT_EQ(messages(), 1u);
  while (messages() < 2) {
    clock_.Advance(seconds(1));
    std::this_thread::yield();
  }
}

TEST_F(SpanExporterTest, SpansThatACollectorRejectsAreCounted) {
  const auto exporter = Make({.batch_max = 1});
  Answer(PartialSuccess{2, "old"});
  exporter->Offer(Call(0));
  exporter->Flush(kNever);
  EXPECT_EQ(exporter->stats().failed, 2);
  EXPECT_EQ(exporter->stats().exported, 1);
  EXPECT_NE(log_.str().find("spans=2 error=\"old\""), std::string::npos) << log_.str();
}

TEST_F(SpanExporterTest, TheEndDoesNotWaitForAHangingCollector) {
  Hold(true);
  auto exporter = Make({.batch_max = 1});
  exporter->Offer(Call(0));
  AwaitMessages(1);
  exporter.reset();
  EXPECT_EQ(messages(), 1u);
}

TEST_F(SpanExporterTest, SpansOfSeveralThreadsAreAllCounted) {
  const auto exporter = Make({.pending_max = 100'000, .batch_max = 64});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&exporter, t] {
      for (uint64_t n = 0; n < 500; ++n) exporter->Offer(Call(n + 500 * static_cast<uint64_t>(t)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  exporter->Flush(kNever);
  EXPECT_EQ(exporter->stats().exported, 2000 * 3);
}

TEST_F(SpanExporterTest, TheClientsFlagDecidesOtherwiseTheRate) {
  Tracer all(1, {1, 2}, Make());
  Tracer none(0, {1, 2}, Make());
  const TraceParent sampled{1, 2, 3, true};
  const TraceParent not_sampled{1, 2, 3, false};
  for (Tracer* const tracer : {&all, &none}) {
    const TraceParent own = tracer->Begin(sampled);
    EXPECT_TRUE(own.valid() && own.sampled);
    EXPECT_EQ(own.trace_high, 1u);
    EXPECT_EQ(own.trace_low, 2u);
    EXPECT_NE(own.span, 3u);
    EXPECT_FALSE(tracer->Begin(not_sampled).valid());
  }
  EXPECT_TRUE(all.Begin({}).valid());
  EXPECT_FALSE(none.Begin({}).valid());
  Tracer some(0.25, {1, 2}, Make());
  int begun = 0;
  for (int n = 0; n < 4000; ++n) begun += some.Begin({}).valid();
  EXPECT_NEAR(begun, 1000, 150);
}

}  // namespace
}  // namespace attend

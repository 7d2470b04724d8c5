// SPDX-License-Identifier: Apache-2.0
//
// Which requests count as ended by their clients, independent of the server: alerts subtract them
// from the errors, or watch them.

#include <gtest/gtest.h>
#include <prometheus/registry.h>

#include <chrono>
#include <string>

#include "server/metrics/metrics.h"
#include "server/util/rejection.h"

namespace attend {
namespace {

using std::chrono::milliseconds;

constexpr TimePoint kReceived(milliseconds(100));

class RequestEndsTest : public testing::Test {
 protected:
  RequestEndsTest() { metrics_.AddDevices({{"cpu", 2}}); }

  // Ends the request with `code`. Returns the family's count.
  double Count(Request& request, Code code, const std::string& family) {
    request.received = kReceived;
    const uint8_t reason = request.status.reason();
    request.status = code == Code::kOk ? Status() : Status(code, "");
    request.status.set_reason(reason);
    metrics_.RecordFinished(request, 1, 0);
    return Counted(family);
  }
  double Counted(const std::string& family, const std::string& label = "") const {
    double count = 0;
    for (const prometheus::MetricFamily& each : metrics_.registry()->Collect()) {
      if (each.name != family) continue;
      for (const prometheus::ClientMetric& metric : each.metric) {
        if (label.empty() || metric.label.front().value == label) count += metric.counter.value;
      }
    }
    return count;
  }

 private:
  Metrics metrics_{"1.2.3"};
};

TEST_F(RequestEndsTest, OnlyADeadlineThatLeavesNoTimeCountsAsShort) {
  const auto count = [&](Code code, TimePoint deadline) {
    Request request;
    request.deadline = deadline;
    return Count(request, code, "attend_short_deadlines_total");
  };
  EXPECT_EQ(count(Code::kDeadlineExceeded, kReceived + milliseconds(10)), 0);
  EXPECT_EQ(count(Code::kDeadlineExceeded, kNever), 0);
  EXPECT_EQ(count(Code::kDeadlineExceeded, kReceived + milliseconds(9)), 1);
  EXPECT_EQ(count(Code::kDeadlineExceeded, kReceived - milliseconds(9)), 2);
  EXPECT_EQ(count(Code::kUnavailable, kReceived + milliseconds(9)), 2);
  EXPECT_EQ(count(Code::kOk, kReceived + milliseconds(9)), 2);
  EXPECT_EQ(Counted("attend_requests_total"), 6);
  EXPECT_EQ(Counted("attend_objective_requests_total"), 4);
}

TEST_F(RequestEndsTest, RequestsWithDeadlinesAreCountedByOutcome) {
  const auto count = [&](Code code, bool late, bool queued, bool started) {
    Request request;
    request.deadline = kReceived + milliseconds(10);
    if (late) request.status = Because(Rejection::kLate, Status(code, ""));
    if (queued) request.enqueued = kReceived;
    if (started) request.started = kReceived;
    return Count(request, code, "attend_deadline_requests_total");
  };
  EXPECT_EQ(count(Code::kOk, false, true, true), 1);
  EXPECT_EQ(count(Code::kResourceExhausted, true, false, false), 2);
  EXPECT_EQ(count(Code::kDeadlineExceeded, true, true, false), 3);
  EXPECT_EQ(count(Code::kDeadlineExceeded, false, true, true), 4);
  EXPECT_EQ(count(Code::kResourceExhausted, false, true, false), 4) << "the queue was full";
  EXPECT_EQ(count(Code::kCancelled, false, true, true), 4);
  Request late;
  late.deadline = kReceived + milliseconds(10);
  late.completed = late.deadline + milliseconds(1);
  EXPECT_EQ(Count(late, Code::kOk, "attend_deadline_requests_total"), 5);
  for (const char* outcome : {"answered", "refused", "dropped", "stopped", "late"}) {
    EXPECT_EQ(Counted("attend_deadline_requests_total", outcome), 1) << outcome;
  }
  Request request;  // without a deadline
  EXPECT_EQ(Count(request, Code::kOk, "attend_deadline_requests_total"), 5);
  request.deadline = kReceived + milliseconds(9);
  EXPECT_EQ(Count(request, Code::kDeadlineExceeded, "attend_deadline_requests_total"), 5);
  request.status = Because(Rejection::kLate, ResourceExhausted(""));
  EXPECT_EQ(Count(request, Code::kResourceExhausted, "attend_short_deadlines_total"), 2);
}

TEST_F(RequestEndsTest, OnlyACancellationBeforeAcceptanceCountsAsEarly) {
  const auto count = [&](Code code, TimePoint enqueued, Transport transport,
                         bool header_taken = false) {
    Request request;
    request.enqueued = enqueued;
    request.transport = transport;
    if (header_taken) request.placement.candidates.resize(1);
    return Count(request, code, "attend_early_cancellations_total");
  };
  const TimePoint queued = kReceived + milliseconds(1);
  EXPECT_EQ(count(Code::kCancelled, queued, Transport::kInline), 0);
  EXPECT_EQ(count(Code::kCancelled, TimePoint(), Transport::kChunked, true), 0);
  EXPECT_EQ(count(Code::kDeadlineExceeded, TimePoint(), Transport::kInline), 0);
  EXPECT_EQ(count(Code::kOk, queued, Transport::kInline), 0);
  EXPECT_EQ(count(Code::kCancelled, TimePoint(), Transport::kInline), 1);
  EXPECT_EQ(count(Code::kCancelled, TimePoint(), Transport::kSharedMemory), 2);
  EXPECT_EQ(count(Code::kCancelled, TimePoint(), Transport::kChunked), 3);
}

}  // namespace
}  // namespace attend

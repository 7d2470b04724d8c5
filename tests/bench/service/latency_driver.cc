// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/latency_driver.h"

#include <chrono>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "tests/bench/service/report.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// The time of copies and kernels that the answer states; negative if it cannot be parsed.
double OwnWorkUs(const grpc::ByteBuffer& answer) {
  grpc::Slice slice;
  v1::AttendResponse response;
  if (!answer.DumpToSingleSlice(&slice).ok() ||
      !response.ParseFromArray(slice.begin(), static_cast<int>(slice.size()))) {
    return -1;
  }
  const v1::Timings& t = response.timings();
  return static_cast<double>(t.copy_in_ns() + t.kernel_ns() + t.copy_out_ns()) * 1e-3;
}

}  // namespace

Result<Sample> DriveLatency(Connections& connections, const PreparedCall& call, bool less_own_work,
                            double seconds) {
  BlockingCaller caller(connections);
  Sample sample;
  std::vector<double> latencies_us;
  const Clock::time_point begin = Clock::now();
  while (sample.seconds < seconds) {
    const Clock::time_point sent = Clock::now();
    const Result<grpc::ByteBuffer> answer = caller.Call(call.request);
    double us = std::chrono::duration<double, std::micro>(Clock::now() - sent).count();
    if (!answer.ok()) return answer.status();
    const std::string wrong = call.verify(*answer, sample.calls % kBytesCheckedEvery == 0);
    if (!wrong.empty()) return Internal(wrong);
    if (less_own_work) {
      const double own_us = OwnWorkUs(*answer);
      if (own_us < 0) return Internal("the answer cannot be parsed");
      us -= own_us;
    }
    latencies_us.push_back(us);
    ++sample.calls;
    sample.bytes += static_cast<int64_t>(call.request.Length() + answer->Length());
    sample.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  sample.p50_us = Percentile(latencies_us, 0.50);
  sample.p99_us = Percentile(latencies_us, 0.99);
  return sample;
}

}  // namespace attend::bench

// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/chunked_driver.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "client/client.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

}  // namespace

ChunkedDriver MakeChunkedDriver(const std::string& target, int connections,
                                std::shared_ptr<const v1::AttendRequest> request,
                                VerifyOutput verify) {
  return [=, client = std::shared_ptr<client::Client>()](double seconds) mutable {
    DriveResult result;
    if (client == nullptr) {
      client::ClientOptions options;
      options.server = target;
      options.connections = connections;
      client = std::move(*client::Client::Make(options));
    }
    const client::AttentionCall call = *client::CallFromRequest(request);
    client::CallOptions options;
    options.transport = client::CallTransport::kChunked;
    const Result<client::AttentionResult> first = client->Call(call, options);
    const bool right = first.ok() && verify(reinterpret_cast<const char*>(first->o.data.get()));
    if (!right) {
      result.failed = 1;
      result.first_error = first.ok() ? "wrong answer" : first.status().ToString();
      return result;
    }
    options.payload = client::Payload::kDiscard;
    std::vector<double> latencies_us;
    const Clock::time_point begin = Clock::now();
    for (Clock::time_point now = begin; result.seconds < seconds;) {
      const Result<client::AttentionResult> answer = client->Call(call, options);
      if (!answer.ok() && result.failed++ == 0) result.first_error = answer.status().ToString();
      result.calls += answer.ok();
      const Clock::time_point end = Clock::now();
      latencies_us.push_back(std::chrono::duration<double, std::micro>(end - now).count());
      now = end;
      result.seconds = std::chrono::duration<double>(end - begin).count();
    }
    result.p50_us = Percentile(latencies_us, 0.5);
    result.p99_us = Percentile(latencies_us, 0.99);
    return result;
  };
}

}  // namespace attend::bench

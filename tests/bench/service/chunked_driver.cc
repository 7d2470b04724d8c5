// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/chunked_driver.h"

#include <chrono>
#include <utility>
#include <vector>

#include "tests/bench/service/report.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

client::CallOptions ChunkedOptions() {
  client::CallOptions options;
  options.transport = client::CallTransport::kChunked;
  return options;
}

}  // namespace

Result<std::unique_ptr<client::Client>> ConnectChunked(const std::string& target, int connections) {
  client::ClientOptions options;
  options.server = target;
  options.connections = connections;
  return client::Client::Make(options);
}

Status CheckChunked(client::Client& client, const Work& work) {
  const Result<client::AttentionResult> answer = client.Call(work.call(), ChunkedOptions());
  if (!answer.ok()) return answer.status();
  if (answer->o.bytes != work.output_bytes()) return Internal("O has a wrong size");
  const std::string wrong = work.CheckOutput(answer->o.data.get());
  return wrong.empty() ? Status() : Internal(wrong);
}

Result<Sample> DriveChunked(client::Client& client, const Work& work, double seconds) {
  client::CallOptions options = ChunkedOptions();
  options.payload = client::Payload::kDiscard;
  Sample sample;
  std::vector<double> latencies_us;
  const Clock::time_point begin = Clock::now();
  while (sample.seconds < seconds) {
    const Clock::time_point sent = Clock::now();
    const Result<client::AttentionResult> answer = client.Call(work.call(), options);
    if (!answer.ok()) return answer.status();
    const Clock::time_point now = Clock::now();
    latencies_us.push_back(std::chrono::duration<double, std::micro>(now - sent).count());
    ++sample.calls;
    sample.bytes += work.input_bytes() + work.output_bytes();
    sample.seconds = std::chrono::duration<double>(now - begin).count();
  }
  sample.p50_us = Percentile(latencies_us, 0.50);
  sample.p99_us = Percentile(latencies_us, 0.99);
  return sample;
}

}  // namespace attend::bench

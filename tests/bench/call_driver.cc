// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/call_driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

double Percentile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const size_t at = std::min(values.size() - 1, static_cast<size_t>(share * values.size()));
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

// One call in flight after another until the time is up.
class Slot {
 public:
  Slot(Stub& stub, const DriveOptions& options, const grpc::ByteBuffer& request,
       const Verify& verify, int verify_every, Clock::time_point end, std::atomic<int>& running,
       std::mutex& mutex, std::condition_variable& done)
      : stub_(stub),
        options_(options),
        request_(request),
        verify_(verify),
        verify_every_(verify_every),
        end_(end),
        running_(running),
        mutex_(mutex),
        done_(done) {}

  void Call() {
    context_ = std::make_unique<grpc::ClientContext>();
    response_.Clear();
    begin_ = Clock::now();
    stub_.UnaryCall(context_.get(), options_.method, {}, &request_, &response_,
                    [this](grpc::Status status) { Ended(status); });
  }

  DriveResult result;
  std::vector<double> latencies_us;

 private:
  void Ended(const grpc::Status& status) {
    const Clock::time_point now = Clock::now();
    std::string error = status.ok() ? "" : status.error_message();
    if (status.ok() && result.calls % verify_every_ == 0) error = verify_(response_);
    if (error.empty()) {
      ++result.calls;
      latencies_us.push_back(std::chrono::duration<double, std::micro>(now - begin_).count());
    } else {
      if (result.failed++ == 0) result.first_error = error;
    }
    if (now < end_ && result.failed < 10) {
      Call();
      return;
    }
    std::lock_guard lock(mutex_);
    if (running_.fetch_sub(1) == 1) done_.notify_one();
  }

  Stub& stub_;
  const DriveOptions& options_;
  const grpc::ByteBuffer& request_;
  const Verify& verify_;
  const int verify_every_;
  const Clock::time_point end_;
  std::atomic<int>& running_;
  std::mutex& mutex_;
  std::condition_variable& done_;
  std::unique_ptr<grpc::ClientContext> context_;
  grpc::ByteBuffer response_;
  Clock::time_point begin_;
};

}  // namespace

Connections::Connections(const std::string& target, int count) {
  for (int i = 0; i < count; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    stubs_.push_back(std::make_unique<Stub>(
        grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments)));
  }
}

Stub& Connections::stub(int index) { return *stubs_[index % stubs_.size()]; }

DriveResult Drive(Connections& connections, const DriveOptions& options,
                  const grpc::ByteBuffer& request, const Verify& verify, int verify_every) {
  std::atomic<int> running{options.outstanding};
  std::mutex mutex;
  std::condition_variable done;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end = begin + std::chrono::duration_cast<Clock::duration>(
                                            std::chrono::duration<double>(options.seconds));
  std::vector<std::unique_ptr<Slot>> slots;
  for (int i = 0; i < options.outstanding; ++i) {
    slots.push_back(std::make_unique<Slot>(connections.stub(i), options, request, verify,
                                           verify_every, end, running, mutex, done));
  }
  for (const auto& slot : slots) slot->Call();
  std::unique_lock lock(mutex);
  done.wait(lock, [&running] { return running.load() == 0; });

  DriveResult total;
  total.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::vector<double> latencies_us;
  for (const auto& slot : slots) {
    total.calls += slot->result.calls;
    total.failed += slot->result.failed;
    if (total.first_error.empty()) total.first_error = slot->result.first_error;
    latencies_us.insert(latencies_us.end(), slot->latencies_us.begin(), slot->latencies_us.end());
  }
  total.p50_us = Percentile(latencies_us, 0.50);
  total.p99_us = Percentile(latencies_us, 0.99);
  return total;
}

}  // namespace attend::bench

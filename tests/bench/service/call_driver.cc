// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/call_driver.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "tests/bench/service/report.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Shared by the callers of a drive.
struct Shared {
  std::atomic<int> running;
  std::atomic<bool> failed = false;
  Clock::time_point end;
  std::mutex mutex;
  std::condition_variable done;
};

// Makes one call after another until the time is up.
class Caller {
 public:
  Caller(Stub& stub, const Script& script, Shared& shared)
      : stub_(stub), script_(script), shared_(shared) {}

  void Call() {
    call_ = script_[next_].get();
    if (++next_ == script_.size()) next_ = 0;
    context_ = std::make_unique<grpc::ClientContext>();
    response_.Clear();
    begin_ = Clock::now();
    stub_.UnaryCall(context_.get(), kAttendMethod, {}, &call_->request, &response_,
                    [this](grpc::Status status) { Ended(status); });
  }

  Sample sample;
  std::string error;
  std::vector<double> latencies_us;

 private:
  void Ended(const grpc::Status& status) {
    const Clock::time_point now = Clock::now();
    error = status.ok()
                ? call_->verify(response_, sample.calls % kBytesCheckedEvery == 0)
                : "code " + std::to_string(status.error_code()) + ", " + status.error_message();
    if (error.empty()) {
      ++sample.calls;
      sample.bytes += static_cast<int64_t>(call_->request.Length() + response_.Length());
      latencies_us.push_back(std::chrono::duration<double, std::micro>(now - begin_).count());
    } else {
      shared_.failed = true;
    }
    if (now < shared_.end && !shared_.failed) {
      Call();
      return;
    }
    const std::lock_guard lock(shared_.mutex);
    if (shared_.running.fetch_sub(1) == 1) shared_.done.notify_one();
  }

  Stub& stub_;
  const Script& script_;
  Shared& shared_;
  size_t next_ = 0;
  const PreparedCall* call_ = nullptr;
  std::unique_ptr<grpc::ClientContext> context_;
  grpc::ByteBuffer response_;
  Clock::time_point begin_;
};

}  // namespace

std::shared_ptr<const PreparedCall> CallOf(const std::shared_ptr<const Work>& work,
                                           const std::string& request_id) {
  auto call = std::make_shared<PreparedCall>();
  call->request = work->Message(request_id);
  call->verify = [work](const grpc::ByteBuffer& answer, bool bytes_too) {
    return work->CheckAnswer(answer, bytes_too);
  };
  return call;
}

std::shared_ptr<const PreparedCall> EchoCallOf(const std::shared_ptr<const Work>& work,
                                               int64_t answer_bytes) {
  auto call = std::make_shared<PreparedCall>();
  call->request = work->Message();
  // The work lives as long as the call, whose message is in its memory.
  call->verify = [work, answer_bytes](const grpc::ByteBuffer& answer, bool) -> std::string {
    return static_cast<int64_t>(answer.Length()) == answer_bytes ? "" : "a wrong length";
  };
  return call;
}

Connections::Connections(const std::string& target, int count, const std::string& authority) {
  grpc::SslCredentialsOptions tls;
  tls.pem_root_certs = authority;
  const std::shared_ptr<grpc::ChannelCredentials> credentials =
      authority.empty() ? grpc::InsecureChannelCredentials() : grpc::SslCredentials(tls);
  for (int i = 0; i < count; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    if (!authority.empty()) arguments.SetSslTargetNameOverride(kTlsName);
    stubs_.push_back(
        std::make_unique<Stub>(grpc::CreateCustomChannel(target, credentials, arguments)));
  }
}

BlockingCaller::~BlockingCaller() {
  void* tag = nullptr;
  bool ok = false;
  queue_.Shutdown();
  while (queue_.Next(&tag, &ok)) {
  }
}

Result<grpc::ByteBuffer> BlockingCaller::Call(const grpc::ByteBuffer& request) {
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  grpc::Status status;
  const auto call = stub_.PrepareUnaryCall(&context, kAttendMethod, request, &queue_);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue_.Next(&tag, &ok);
  if (!status.ok()) return Status(static_cast<Code>(status.error_code()), status.error_message());
  return response;
}

Result<Sample> Drive(Connections& connections, const std::vector<Script>& scripts, int in_flight,
                     double seconds) {
  Shared shared;
  shared.running = in_flight;
  const Clock::time_point begin = Clock::now();
  shared.end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<std::unique_ptr<Caller>> callers;
  for (int i = 0; i < in_flight; ++i) {
    const Script& script = scripts[static_cast<size_t>(i) % scripts.size()];
    callers.push_back(std::make_unique<Caller>(connections.stub(i), script, shared));
  }
  for (const auto& caller : callers) caller->Call();
  {
    std::unique_lock lock(shared.mutex);
    shared.done.wait(lock, [&] { return shared.running.load() == 0; });
  }
  Sample total;
  total.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::vector<double> latencies_us;
  for (const auto& caller : callers) {
    if (!caller->error.empty()) return Internal(caller->error);
    total.calls += caller->sample.calls;
    total.bytes += caller->sample.bytes;
    latencies_us.insert(latencies_us.end(), caller->latencies_us.begin(),
                        caller->latencies_us.end());
  }
  total.p50_us = Percentile(latencies_us, 0.50);
  total.p99_us = Percentile(latencies_us, 0.99);
  return total;
}

}  // namespace attend::bench

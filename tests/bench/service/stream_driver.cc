// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/stream_driver.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/service/report.h"

namespace attend::bench {
namespace {

using Clock = std::chrono::steady_clock;

// request_id is an answer's first field.
constexpr char kRequestIdTag = 0x0a;
constexpr size_t kIdBytes = 4;

// The slot of an answer; -1 if its id is unknown.
int SlotOf(const grpc::ByteBuffer& answer, int slots) {
  std::vector<grpc::Slice> slices;
  if (!answer.Dump(&slices).ok() || slices.empty()) return -1;
  // gRPC's first slice may have a single byte.
  std::string head;
  for (size_t n = 0; n < slices.size() && head.size() < 2 + kIdBytes; ++n) {
    head.append(reinterpret_cast<const char*>(slices[n].begin()), slices[n].size());
  }
  if (head.size() < 2 + kIdBytes || head[0] != kRequestIdTag || head[1] != kIdBytes) return -1;
  int slot = 0;
  for (size_t i = 0; i < kIdBytes; ++i) {
    const int digit = head[2 + i] - '0';
    if (digit < 0 || digit > 9) return -1;
    slot = 10 * slot + digit;
  }
  return slot < slots ? slot : -1;
}

// A stream. gRPC calls OnReadDone and OnWriteDone concurrently on different threads.
class StreamClient final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  StreamClient(Stub& stub, const StreamScripts& scripts, Clock::time_point end) : end_(end) {
    for (const Script& script : scripts) {
      waiting_.push_back(static_cast<int>(slots_.size()));
      slots_.push_back({.script = script});
    }
    stub.PrepareBidiStreamingCall(&context_, kStreamMethod, {}, this);
  }

  void Start() {
    StartCall();
    StartRead(&answer_);
    const std::lock_guard lock(mutex_);
    WriteNextLocked();
  }

  // Called once, as the last method.
  Status Wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return over_; });
    return status_;
  }

  Sample sample;
  std::vector<double> latencies_us;

 private:
  struct Slot {
    const Script& script;
    size_t next = 0;
    const PreparedCall* call = nullptr;  // in flight
    Clock::time_point sent = {};
  };

  void WriteNextLocked() {
    if (writing_ || closed_) return;
    if (waiting_.empty()) {
      closed_ = unanswered_ == 0 && enough_;
      if (closed_) StartWritesDone();
      return;
    }
    Slot& slot = slots_[static_cast<size_t>(waiting_.front())];
    waiting_.pop_front();
    writing_ = true;
    ++unanswered_;
    slot.call = slot.script[slot.next].get();
    if (++slot.next == slot.script.size()) slot.next = 0;
    slot.sent = Clock::now();
    grpc::WriteOptions options;
    if (!waiting_.empty()) options.set_buffer_hint();  // another message follows at once
    StartWrite(&slot.call->request, options);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) WriteNextLocked();
  }

  // Null if the slot is -1 or has no call in flight.
  const PreparedCall* CallInFlight(int slot) {
    const std::lock_guard lock(mutex_);
    return slot < 0 ? nullptr : slots_[static_cast<size_t>(slot)].call;
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const Clock::time_point now = Clock::now();
    const int slot = SlotOf(answer_, static_cast<int>(slots_.size()));
    const PreparedCall* const call = CallInFlight(slot);
    const std::string wrong = call == nullptr
                                  ? "an answer to an unknown request"
                                  : call->verify(answer_, sample.calls % kBytesCheckedEvery == 0);
    const int64_t bytes = static_cast<int64_t>(answer_.Length());
    answer_.Clear();
    {
      const std::lock_guard lock(mutex_);
      if (!wrong.empty()) {
        status_ = Internal(wrong);
        context_.TryCancel();
        return;
      }
      ++sample.calls;
      sample.bytes += bytes + static_cast<int64_t>(call->request.Length());
      Slot& answered = slots_[static_cast<size_t>(slot)];
      answered.call = nullptr;
      latencies_us.push_back(
          std::chrono::duration<double, std::micro>(now - answered.sent).count());
      --unanswered_;
      enough_ = now >= end_;
      if (!enough_) waiting_.push_back(slot);
      WriteNextLocked();
    }
    StartRead(&answer_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(mutex_);
    if (status_.ok() && !status.ok()) {
      status_ = Status(static_cast<Code>(status.error_code()), status.error_message());
    }
    if (status_.ok() && unanswered_ > 0) status_ = Internal("the stream ended early");
    over_ = true;
    ended_.notify_one();
  }

  const Clock::time_point end_;
  grpc::ClientContext context_;
  grpc::ByteBuffer answer_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Slot> slots_;
  std::deque<int> waiting_;  // slots to be written
  int unanswered_ = 0;
  bool writing_ = false;
  bool enough_ = false;  // the time is up
  bool closed_ = false;
  bool over_ = false;
  Status status_;
};

}  // namespace

std::string StreamId(int slot) {
  std::string digits = std::to_string(slot);
  return std::string(kIdBytes - digits.size(), '0') + digits;
}

StreamScripts StreamScriptsOf(const std::shared_ptr<const Work>& work, int in_flight) {
  StreamScripts scripts;
  for (int i = 0; i < in_flight; ++i) scripts.push_back({CallOf(work, StreamId(i))});
  return scripts;
}

Result<Sample> DriveStreams(Connections& connections, const std::vector<StreamScripts>& scripts,
                            int clients, double seconds) {
  const Clock::time_point begin = Clock::now();
  const auto length =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<std::unique_ptr<StreamClient>> streams;
  for (int i = 0; i < clients; ++i) {
    streams.push_back(std::make_unique<StreamClient>(
        connections.stub(i), scripts[static_cast<size_t>(i) % scripts.size()], begin + length));
  }
  for (const auto& stream : streams) stream->Start();
  Status failed;
  for (const auto& stream : streams) {
    const Status status = stream->Wait();
    if (failed.ok()) failed = status;
  }
  if (!failed.ok()) return failed;
  Sample total;
  total.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::vector<double> latencies_us;
  for (const auto& stream : streams) {
    total.calls += stream->sample.calls;
    total.bytes += stream->sample.bytes;
    latencies_us.insert(latencies_us.end(), stream->latencies_us.begin(),
                        stream->latencies_us.end());
  }
  total.p50_us = Percentile(latencies_us, 0.50);
  total.p99_us = Percentile(latencies_us, 0.99);
  return total;
}

}  // namespace attend::bench

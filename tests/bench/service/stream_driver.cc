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

std::string IdOf(int slot) {
  std::string digits = std::to_string(slot);
  return std::string(kIdBytes - digits.size(), '0') + digits;
}

// The slot that an answer is of; -1 if it has no id of ours.
int SlotOf(const grpc::ByteBuffer& answer, int slots) {
  std::vector<grpc::Slice> slices;
  if (!answer.Dump(&slices).ok() || slices.empty()) return -1;
  // gRPC's first slice may be as short as a byte.
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

// One stream. gRPC runs a read's and a write's end on different threads at once.
class StreamClient final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  StreamClient(Stub& stub, const std::shared_ptr<const Work>& work, int in_flight,
               Clock::time_point end)
      : work_(work), end_(end), sent_(static_cast<size_t>(in_flight)) {
    for (int i = 0; i < in_flight; ++i) {
      messages_.push_back(work->Message(IdOf(i)));
      waiting_.push_back(i);
    }
    stub.PrepareBidiStreamingCall(&context_, kStreamMethod, {}, this);
  }

  void Start() {
    StartCall();
    StartRead(&answer_);
    const std::lock_guard lock(mutex_);
    WriteNextLocked();
  }

  // Once and last.
  Status Wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return over_; });
    return status_;
  }

  Sample sample;
  std::vector<double> latencies_us;

 private:
  void WriteNextLocked() {
    if (writing_ || closed_) return;
    if (waiting_.empty()) {
      closed_ = unanswered_ == 0 && enough_;
      if (closed_) StartWritesDone();
      return;
    }
    const int slot = waiting_.front();
    waiting_.pop_front();
    writing_ = true;
    ++unanswered_;
    sent_[static_cast<size_t>(slot)] = Clock::now();
    grpc::WriteOptions options;
    if (!waiting_.empty()) options.set_buffer_hint();  // one more follows at once
    StartWrite(&messages_[static_cast<size_t>(slot)], options);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) WriteNextLocked();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const Clock::time_point now = Clock::now();
    const int slot = SlotOf(answer_, static_cast<int>(messages_.size()));
    std::string wrong = work_->CheckAnswer(answer_, sample.calls % kBytesCheckedEvery == 0);
    if (slot < 0 && wrong.empty()) wrong = "an answer to nothing that was asked";
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
      sample.bytes += bytes + static_cast<int64_t>(messages_[static_cast<size_t>(slot)].Length());
      latencies_us.push_back(
          std::chrono::duration<double, std::micro>(now - sent_[static_cast<size_t>(slot)])
              .count());
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

  const std::shared_ptr<const Work> work_;
  const Clock::time_point end_;
  grpc::ClientContext context_;
  grpc::ByteBuffer answer_;
  std::vector<grpc::ByteBuffer> messages_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Clock::time_point> sent_;
  std::deque<int> waiting_;  // slots to be written
  int unanswered_ = 0;
  bool writing_ = false;
  bool enough_ = false;  // the time is up
  bool closed_ = false;
  bool over_ = false;
  Status status_;
};

}  // namespace

Result<Sample> DriveStreams(Connections& connections, const std::shared_ptr<const Work>& work,
                            int clients, int in_flight, double seconds) {
  const Clock::time_point begin = Clock::now();
  const auto length =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<std::unique_ptr<StreamClient>> streams;
  for (int i = 0; i < clients; ++i) {
    streams.push_back(
        std::make_unique<StreamClient>(connections.stub(i), work, in_flight, begin + length));
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

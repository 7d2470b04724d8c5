// SPDX-License-Identifier: Apache-2.0
//
// Two vectors of equal capacity are swapped between Offer and the thread, so Offer never allocates
// a container. A message is sent when a batch is full or the interval has passed, or at once in
// Flush.

#include "server/trace/span_exporter.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "kernels/util/thread_name.h"

namespace attend {
namespace {

int64_t SpansOf(const CallSpan& call) { return 1 + static_cast<int64_t>(call.phase_count); }

int64_t SpansOf(std::span<const CallSpan> calls) {
  int64_t spans = 0;
  for (const CallSpan& call : calls) spans += SpansOf(call);
  return spans;
}

// The retryable codes of OTLP, as far as this project has them.
bool MayRetry(Code code) {
  return code == Code::kUnavailable || code == Code::kDeadlineExceeded ||
         code == Code::kCancelled || code == Code::kResourceExhausted;
}

}  // namespace

SpanExporter::SpanExporter(Options options, std::unique_ptr<SpanSink> sink, Logger& logger,
                           const Clock& clock)
    : options_(std::move(options)), sink_(std::move(sink)), logger_(logger), clock_(clock) {
  {
    const MutexLock lock(mutex_);
    pending_.reserve(options_.pending_max);
  }
  thread_ = std::thread([this] { Run(); });
}

SpanExporter::~SpanExporter() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  sink_->Cancel();
  thread_.join();
}

void SpanExporter::Offer(CallSpan&& call) {
  const MutexLock lock(mutex_);
  if (stop_ || pending_.size() >= options_.pending_max) {
    stats_.dropped += SpansOf(call);
    return;
  }
  pending_.push_back(std::move(call));  // within the reserved capacity
  if (pending_.size() == 1 || pending_.size() == options_.batch_max) changed_.NotifyAll();
}

void SpanExporter::Flush(TimePoint until) {
  const MutexLock lock(mutex_);
  hurry_ = true;
  changed_.NotifyAll();
  while (!pending_.empty() || sending_) {
    if (!clock_.WaitUntil(sent_, mutex_, until)) break;
  }
  hurry_ = false;
}

SpanExporter::Stats SpanExporter::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

void SpanExporter::Run() {
  NameThread("attend-spans");
  std::vector<CallSpan> calls;
  calls.reserve(options_.pending_max);
  MutexLock lock(mutex_);
  for (;;) {
    while (pending_.empty() && !stop_) changed_.Wait(mutex_);
    const TimePoint due = clock_.Now() + options_.interval;
    while (!stop_ && !hurry_ && pending_.size() < options_.batch_max) {
      if (!clock_.WaitUntil(changed_, mutex_, due)) break;
    }
    if (stop_) {
      stats_.dropped += SpansOf(pending_);
      return;
    }
    calls.swap(pending_);
    sending_ = true;
    lock.Unlock();
    for (std::span<const CallSpan> rest = calls; !rest.empty();) {
      const size_t count = std::min(rest.size(), options_.batch_max);
      SendBatch(rest.first(count));
      rest = rest.subspan(count);
    }
    calls.clear();
    lock.Lock();
    sending_ = false;
    if (pending_.empty()) sent_.NotifyAll();
  }
}

void SpanExporter::SendBatch(std::span<const CallSpan> calls) {
  const int64_t spans = SpansOf(calls);
  int64_t failed = spans;
  std::string error;
  try {
    const Result<PartialSuccess> sent = TrySend(calls);
    if (!sent.ok()) {
      error = sent.status().ToString();
    } else {
      failed = std::clamp<int64_t>(sent->rejected, 0, spans);
      error = sent->error;
    }
  } catch (const std::exception& thrown) {  // out of memory
    error = thrown.what();
  }
  int64_t dropped = 0;
  {
    const MutexLock lock(mutex_);
    stats_.failed += failed;
    stats_.exported += spans - failed;
    dropped = stats_.dropped - std::exchange(said_dropped_, stats_.dropped);
  }
  SayLost("failed", failed, error);
  SayLost("dropped", dropped, "they arrive faster than the collector accepts them");
}

void SpanExporter::SayLost(std::string_view kind, int64_t spans, std::string_view error) {
  if (spans == 0) return;
  logger_.Log(LogLevel::warn, "spans are lost", {{"spans", spans}, {"error", error}}, kind);
}

Result<PartialSuccess> SpanExporter::TrySend(std::span<const CallSpan> calls) {
  Duration wait = options_.retry_wait;
  for (int attempt = 1;; ++attempt) {
    Result<PartialSuccess> sent = sink_->Send(calls, options_.timeout);
    if (sent.ok() || !MayRetry(sent.status().code()) || attempt >= options_.attempts_max ||
        !Pause(wait)) {
      return sent;
    }
    wait *= 2;
  }
}

bool SpanExporter::Pause(Duration duration) {
  const MutexLock lock(mutex_);
  const TimePoint until = clock_.Now() + duration;
  while (!stop_ && !hurry_) {
    if (!clock_.WaitUntil(changed_, mutex_, until)) return true;
  }
  return !stop_;
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Sends spans to a collector on a thread of its own, so that no call waits for it. The backlog is
// bounded; spans beyond it are dropped. A batch that the collector does not accept is retried a few
// times and then dropped. Dropped spans are counted.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/trace/call_span.h"

namespace attend {

// The collector's answer: how many spans it rejected, and why.
struct PartialSuccess {
  int64_t rejected = 0;
  std::string error;
};

// The connection to a collector.
class SpanSink {
 public:
  virtual ~SpanSink() = default;
  // Sends the calls' spans. One thread at a time.
  virtual Result<PartialSuccess> Send(std::span<const CallSpan> calls, Duration timeout) = 0;
  // Reads its credential files again.
  virtual Status Reload() { return Status(); }
  // Aborts the current Send and all later ones with an error. Any thread.
  virtual void Cancel() = 0;
};

class SpanExporter {
 public:
  struct Options {
    size_t pending_max = 4096;  // calls
    size_t batch_max = 256;     // calls in one message; each takes about 2 KiB at most
    Duration interval = std::chrono::seconds(1);  // between messages, unless a batch is full
    int attempts_max = 3;
    Duration retry_wait = std::chrono::seconds(1);  // doubled after each attempt
    Duration timeout = std::chrono::seconds(5);     // per attempt
  };
  // `logger` and `clock` must outlive the exporter.
  SpanExporter(Options options, std::unique_ptr<SpanSink> sink, Logger& logger, const Clock& clock);
  ~SpanExporter();  // drops what is left
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  // Takes a call's spans or drops them; never waits. This and the following functions are
  // thread-safe.
  void Offer(CallSpan&& call);
  // See SpanSink.
  Status Reload() { return sink_->Reload(); }
  // Waits until everything offered has been sent or dropped, or until `until`.
  void Flush(TimePoint until);

  struct Stats {  // in spans
    int64_t exported = 0;
    int64_t dropped = 0;  // the backlog was full, or the exporter stopped
    int64_t failed = 0;   // the collector did not accept them
  };
  Stats stats() const;

 private:
  void Run();
  void SendBatch(std::span<const CallSpan> calls);
  void SayLost(std::string_view kind, int64_t spans, std::string_view error);
  // Retries until the batch is accepted or the attempts are used up.
  Result<PartialSuccess> TrySend(std::span<const CallSpan> calls);
  // False: the exporter is stopping.
  bool Pause(Duration duration);

  const Options options_;
  const std::unique_ptr<SpanSink> sink_;
  Logger& logger_;
  const Clock& clock_;
  mutable Mutex mutex_;
  CondVar changed_;
  CondVar sent_;
  std::vector<CallSpan> pending_ ATTEND_GUARDED_BY(mutex_);
  bool sending_ ATTEND_GUARDED_BY(mutex_) = false;
  bool hurry_ ATTEND_GUARDED_BY(mutex_) = false;
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
  // How many of stats_.dropped have been logged.
  int64_t said_dropped_ ATTEND_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace attend

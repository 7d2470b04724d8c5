// SPDX-License-Identifier: Apache-2.0
//
// The access log: one line of JSON per call, separate from the log of events. Ordinary calls are
// sampled; failed and slow ones are all logged. Each kind has its own limit of lines per second.
// Lines are written by a separate thread (line_writer.h). Thread-safe, except Open.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/line_writer.h"
#include "server/log/log_limit.h"
#include "server/log/log_line.h"
#include "server/log/logging.h"

namespace attend {

class AccessLog {
 public:
  struct Options {
    std::string path = {};  // empty: stderr
    double sample = 1;      // share of ordinary calls
    // Slower calls are not ordinary.
    Duration slow = std::chrono::seconds(1);
    double rate = 0;  // lines per second, for ordinary calls and for the others each; 0: no limit
  };
  // An error if the file cannot be opened. `logger` and `clock` must outlive the log.
  static Result<std::unique_ptr<AccessLog>> Open(const Options& options, Logger& logger,
                                                 const Clock& clock);

  // Whether to write a line for call `id`. Ask once per call: each "yes" counts towards the limits.
  bool Wants(uint64_t id, bool failed, int64_t total_ns);
  // The same for a refused caller. These have a limit of their own even without a rate: anyone who
  // can connect can be refused as often as it likes.
  bool WantsRefused();
  // Writes a line with the time and these fields. The line is lost if memory runs out.
  void Write(std::span<const LogField> fields);

  // See LineWriter.
  Status Reopen() { return writer_->Reopen(); }
  void Flush(TimePoint until) { writer_->Flush(until); }

  struct Stats {
    int64_t written = 0;
    int64_t lost = 0;     // the disk was full, or lines came faster than they could be written
    int64_t limited = 0;  // over the rate
  };
  Stats stats() const;

 private:
  // Lines per second for refused callers if there is no rate.
  static constexpr double kRefusedRate = 50;

  AccessLog(const Options& options, std::unique_ptr<LineWriter> writer, const Clock& clock)
      : options_(options),
        clock_(clock),
        writer_(std::move(writer)),
        limit_(options.rate),
        refused_limit_(options.rate > 0 ? options.rate : kRefusedRate) {}

  const Options options_;
  const Clock& clock_;
  const std::unique_ptr<LineWriter> writer_;
  mutable Mutex mutex_;
  LogLimit limit_ ATTEND_GUARDED_BY(mutex_);
  LogLimit refused_limit_ ATTEND_GUARDED_BY(mutex_);
  int64_t limited_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t no_memory_ ATTEND_GUARDED_BY(mutex_) = 0;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The access log: one line of JSON for each call, beside the log of events. Ordinary ones are
// sampled; those that failed or were slow are all written. Both have a limit of lines a second of
// their own, and are written by a thread of the log's (line_writer.h). Thread-safe, except Open.

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
    // Calls that took longer are not ordinary.
    Duration slow = std::chrono::seconds(1);
    double rate = 0;  // lines per second of ordinary calls, and of the others; 0: no limit
  };
  // An error if the file cannot be opened. `logger` and `clock` must outlive the log.
  static Result<std::unique_ptr<AccessLog>> Open(const Options& options, Logger& logger,
                                                 const Clock& clock);

  // Whether the call with this number is to have a line. Ask once for each: it counts towards the
  // limits.
  bool Wants(uint64_t id, bool failed, int64_t total_ns);
  // Whether a caller who was refused is to have one. These have a limit of their own, whatever the
  // rate is: whoever can connect may be refused as often as it likes.
  bool WantsRefused();
  // Writes a line with the time and these fields. Loses it where there is no memory.
  void Write(std::span<const LogField> fields);

  // See LineWriter.
  Status Reopen() { return writer_->Reopen(); }
  void Flush(TimePoint until) { writer_->Flush(until); }

  struct Stats {
    int64_t written = 0;
    int64_t lost = 0;     // the disk was full, or the lines came faster than they were written
    int64_t limited = 0;  // beyond the rate
  };
  Stats stats() const;

 private:
  // Lines per second of refused callers where there is no rate.
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

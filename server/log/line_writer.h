// SPDX-License-Identifier: Apache-2.0
//
// Writes lines to a file, a pipe or stderr on a thread of its own, so that nobody who has a line
// waits for a disk or a reader. What has not been written yet is bounded; lines beyond it, and
// lines that the system does not take, are lost and counted. A line is in the file whole, or, if
// the disk was full within it, ends where the next one begins.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/util/unique_fd.h"

namespace attend {

class LineWriter {
 public:
  struct Options {
    std::string name;  // what errors name
    std::string path;  // empty: stderr
    size_t pending_bytes_max = size_t{4} << 20;
  };
  // An error if the file cannot be opened; its folder must exist. `logger`, which must outlive the
  // writer, hears of lines that are lost.
  static Result<std::unique_ptr<LineWriter>> Open(const Options& options, Logger& logger);
  ~LineWriter();  // writes what it can within a moment
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Takes a line, with its newline, or loses it. Never waits for the file. These three are
  // thread-safe.
  void Push(std::string_view line);
  // Opens the path anew, as it was moved away; what is not yet written goes there. If that fails,
  // goes on with the old file.
  Status Reopen();
  // Waits until what was pushed is written or lost, or until `until` by the true time.
  void Flush(TimePoint until);

  struct Stats {
    int64_t written = 0;
    int64_t lost = 0;
  };
  Stats stats() const;

 private:
  LineWriter(const Options& options, Logger& logger) : options_(options), logger_(logger) {}
  Result<UniqueFd> OpenFile() const;
  void SetFile(UniqueFd file);
  void Run();
  void WriteLines(std::string_view lines);
  // These return how many bytes were written.
  size_t WritePiece(std::string_view piece);
  size_t Write(std::string_view bytes);
  // False: it is the end, and nobody reads.
  bool WaitUntilWritable();
  // Logs how many lines were lost since it last did.
  void SayLost();

  const Options options_;
  Logger& logger_;

  mutable Mutex mutex_;
  CondVar changed_;
  CondVar written_all_;
  std::string pending_ ATTEND_GUARDED_BY(mutex_);
  bool idle_ ATTEND_GUARDED_BY(mutex_) = false;           // the thread waits for a line
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;        // the thread has lines that pending_ had
  bool hurry_ ATTEND_GUARDED_BY(mutex_) = false;          // somebody waits for the lines
  UniqueFd reopened_ ATTEND_GUARDED_BY(mutex_);           // to go on with
  TimePoint give_up_ ATTEND_GUARDED_BY(mutex_) = kNever;  // the end: what is left then is lost
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
  int64_t said_lost_ ATTEND_GUARDED_BY(mutex_) = 0;  // of stats_.lost

  // The thread's.
  UniqueFd file_;
  bool regular_ = false;  // else lines are written in pieces that a pipe takes whole
  bool torn_ = false;     // the file ends within a line
  std::string error_;     // why lines were lost last
  std::thread thread_;
};

}  // namespace attend

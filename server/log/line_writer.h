// SPDX-License-Identifier: Apache-2.0
//
// Writes lines to a file, a pipe or stderr on a thread of its own, so that nobody who has a line
// waits for a disk or a reader. What has not been written yet is bounded; lines beyond it, and
// lines that the system does not take, are lost and counted. A line is in the file whole, or, if
// the disk was full within it, ends where the next one begins.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/util/unique_fd.h"

namespace attend {

class LineWriter {
 public:
  struct Options {
    std::string name;  // what errors name
    std::string path;  // empty: stderr
    size_t pending_bytes_max = size_t{4} << 20;
    // Lines of this time are written together: waking the thread costs more than a line.
    Duration linger = std::chrono::milliseconds(20);
  };
  struct Lost {
    int64_t lines = 0;
    std::string error;  // of the latest
  };
  // Hears of lines that were lost since it last did, on the writer's thread.
  using OnLost = std::function<void(const Lost& lost)>;

  // An error if the file cannot be opened; its folder must exist. `on_lost` may be null.
  static Result<std::unique_ptr<LineWriter>> Open(const Options& options, OnLost on_lost);
  ~LineWriter();  // writes what it can within a moment
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Takes a line, with its newline, or loses it. Never waits for the file. These are thread-safe.
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
  const std::string& path() const { return options_.path; }
  // Lines lost since the last call, once lines are written again. For a log that says so itself.
  Lost TakeLost();
  // Whether all that was pushed is written or lost. Without a lock, for signal handlers.
  bool idle() const { return unwritten_bytes_.load(std::memory_order_acquire) == 0; }

 private:
  LineWriter(const Options& options, OnLost on_lost)
      : options_(options), on_lost_(std::move(on_lost)) {}
  Result<UniqueFd> OpenFile() const;
  void SetFile(UniqueFd file);
  void Run();
  void WriteLines(std::string_view lines);
  // These return how many bytes were written.
  size_t WritePiece(std::string_view piece);
  size_t Write(std::string_view bytes);
  // False: it is the end, and nobody reads.
  bool WaitUntilWritable();
  // Tells on_lost_ how many lines were lost since it last did.
  void SayLost();
  void SetError(int error);

  const Options options_;
  const OnLost on_lost_;
  std::atomic<int64_t> unwritten_bytes_{0};

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
  int64_t said_lost_ ATTEND_GUARDED_BY(mutex_) = 0;   // of stats_.lost
  int64_t taken_lost_ ATTEND_GUARDED_BY(mutex_) = 0;  // likewise
  bool failing_ ATTEND_GUARDED_BY(mutex_) = false;    // the last write lost lines
  int error_ ATTEND_GUARDED_BY(mutex_) = 0;           // why lines were lost last

  // The thread's.
  UniqueFd file_;
  bool regular_ = false;  // else lines are written in pieces that a pipe takes whole
  bool torn_ = false;     // the file ends within a line
  std::thread thread_;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Writes lines to a file, a pipe or stderr on its own thread, so that no caller waits for a disk or
// a reader. Unwritten lines are bounded; lines beyond the bound, and lines that the system refuses,
// are lost and counted. Every line in the file is complete; if the disk fills up within a line,
// that line ends where the next one begins.

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
    std::string name;  // name in error messages
    std::string path;  // empty: stderr
    size_t pending_bytes_max = size_t{4} << 20;
    // Lines that come within this time are written together: waking the thread costs more than a
    // line.
    Duration linger = std::chrono::milliseconds(20);
  };
  struct Lost {
    int64_t lines = 0;
    std::string error;  // of the latest loss
  };
  // Told of newly lost lines, on the writer's thread.
  using OnLost = std::function<void(const Lost& lost)>;

  // An error if the file cannot be opened; its folder must exist. `on_lost` may be null.
  static Result<std::unique_ptr<LineWriter>> Open(const Options& options, OnLost on_lost);
  ~LineWriter();  // spends at most 0.5 s on unwritten lines
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;

  // Takes a line with its newline, or loses it. Never waits for the file. Thread-safe, as are the
  // functions below.
  void Push(std::string_view line);
  // Opens the path again after a log rotation; unwritten lines go there. On failure, the old file
  // stays in use.
  Status Reopen();
  // Waits until all pushed lines are written or lost, or until `until` on the steady clock.
  void Flush(TimePoint until);

  struct Stats {
    int64_t written = 0;
    int64_t lost = 0;
  };
  Stats stats() const;
  const std::string& path() const { return options_.path; }
  // Lines lost since the last call, reported once writing works again. For a log that reports its
  // own losses.
  Lost TakeLost();
  // Whether all pushed lines are written or lost. Lock-free, for signal handlers.
  bool idle() const { return unwritten_bytes_.load(std::memory_order_acquire) == 0; }

 private:
  LineWriter(const Options& options, OnLost on_lost)
      : options_(options), on_lost_(std::move(on_lost)) {}
  Result<UniqueFd> OpenFile() const;
  void SetFile(UniqueFd file);
  void Run();
  void WriteLines(std::string_view lines);
  // These return the number of bytes written.
  size_t WritePiece(std::string_view piece);
  size_t Write(std::string_view bytes);
  // False: the writer is ending and its time is up.
  bool WaitUntilWritable();
  // Reports newly lost lines to on_lost_.
  void SayLost();
  void SetError(int error);

  const Options options_;
  const OnLost on_lost_;
  std::atomic<int64_t> unwritten_bytes_{0};

  mutable Mutex mutex_;
  CondVar changed_;
  CondVar written_all_;
  std::string pending_ ATTEND_GUARDED_BY(mutex_);
  bool idle_ ATTEND_GUARDED_BY(mutex_) = false;  // the thread waits for a line
  // the thread is writing lines taken from pending_
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool hurry_ ATTEND_GUARDED_BY(mutex_) = false;          // Flush is waiting
  UniqueFd reopened_ ATTEND_GUARDED_BY(mutex_);           // the file to continue with
  TimePoint give_up_ ATTEND_GUARDED_BY(mutex_) = kNever;  // the end: lines left after that are lost
  Stats stats_ ATTEND_GUARDED_BY(mutex_);
  int64_t said_lost_ ATTEND_GUARDED_BY(mutex_) = 0;   // part of stats_.lost reported by SayLost
  int64_t taken_lost_ ATTEND_GUARDED_BY(mutex_) = 0;  // likewise, by TakeLost
  bool failing_ ATTEND_GUARDED_BY(mutex_) = false;    // the last write lost lines
  int error_ ATTEND_GUARDED_BY(mutex_) = 0;           // the cause of the latest loss

  // The thread's only.
  UniqueFd file_;
  bool regular_ = false;  // otherwise lines are written in pieces that a pipe accepts whole
  bool torn_ = false;     // the file ends within a line
  std::thread thread_;
};

}  // namespace attend

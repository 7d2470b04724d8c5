// SPDX-License-Identifier: Apache-2.0
//
// Two buffers of pending_bytes_max are reserved at the start and swapped, so that neither Push nor
// the thread allocates. The thread writes without the lock; Push appends to the other buffer
// meanwhile.
//
// Pipes and terminals are written in pieces of at most PIPE_BUF bytes after POLLOUT: such a write
// does not block, and lines of several processes on one pipe do not mix. A file that ends within a
// line (torn_) gets a newline first.

#include "server/log/line_writer.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "kernels/util/thread_name.h"

namespace attend {
namespace {

using std::chrono::milliseconds;

// For unwritten lines when the writer ends.
constexpr milliseconds kLastLinesTime{500};
// How often a wait for a slow reader checks for the end, in milliseconds.
constexpr int kLookMs = 50;
constexpr size_t kPieceBytes = size_t{64} << 10;

// Causes of loss besides errno values.
constexpr int kTooFast = 0;
constexpr int kNoReader = -1;

std::string TextOf(int error) {
  if (error == kTooFast) return "lines arrive faster than they can be written";
  return error == kNoReader ? "its reader has stopped reading" : std::strerror(error);
}

TimePoint TrueTime() { return std::chrono::steady_clock::now(); }

int64_t CountLines(std::string_view text) { return std::count(text.begin(), text.end(), '\n'); }

// The first complete lines, of at most `bytes_max` bytes, but at least one line.
std::string_view FirstLines(std::string_view lines, size_t bytes_max) {
  if (lines.size() <= bytes_max) return lines;
  size_t end = lines.rfind('\n', bytes_max - 1);
  if (end == std::string_view::npos) end = lines.find('\n', bytes_max);
  return lines.substr(0, end + 1);
}

// A closed pipe or a file size limit must fail the write, not kill the process.
void BlockSignalsOfWrites() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

}  // namespace

Result<std::unique_ptr<LineWriter>> LineWriter::Open(const Options& options, OnLost on_lost) {
  std::unique_ptr<LineWriter> writer(new LineWriter(options, std::move(on_lost)));
  Result<UniqueFd> file = writer->OpenFile();
  if (!file.ok()) return file.status();
  writer->SetFile(std::move(*file));
  {
    const MutexLock lock(writer->mutex_);
    writer->pending_.reserve(options.pending_bytes_max);
  }
  writer->thread_ = std::thread([raw = writer.get()] { raw->Run(); });
  return writer;
}

LineWriter::~LineWriter() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    give_up_ = TrueTime() + kLastLinesTime;
    changed_.NotifyAll();
  }
  thread_.join();
}

Result<UniqueFd> LineWriter::OpenFile() const {
  // Non-blocking, so that a named pipe's reader cannot hold up the thread. stderr is shared with
  // others, so its flags stay as they are.
  UniqueFd file(options_.path.empty()
                    ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0)
                    : open(options_.path.c_str(),
                           O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
                           0640));
  if (file.valid()) return file;
  return Status(Code::kNotFound, options_.name + " " +
                                     (options_.path.empty() ? "stderr" : options_.path) +
                                     " cannot be opened: " + std::strerror(errno));
}

void LineWriter::SetFile(UniqueFd file) {
  struct stat about {};
  regular_ = fstat(file.get(), &about) == 0 && S_ISREG(about.st_mode);
  file_ = std::move(file);
  torn_ = false;
}

void LineWriter::Push(std::string_view line) {
  const MutexLock lock(mutex_);
  if (give_up_ != kNever || pending_.size() + line.size() > options_.pending_bytes_max) {
    ++stats_.lost;
    error_ = kTooFast;
    return;
  }
  pending_.append(line);
  unwritten_bytes_.fetch_add(static_cast<int64_t>(line.size()), std::memory_order_relaxed);
  if (idle_) changed_.NotifyAll();
}

Status LineWriter::Reopen() {
  Result<UniqueFd> file = OpenFile();
  if (!file.ok()) return file.status();
  const MutexLock lock(mutex_);
  reopened_ = std::move(*file);
  return Status();
}

void LineWriter::Flush(TimePoint until) {
  const MutexLock lock(mutex_);
  hurry_ = true;
  changed_.NotifyAll();
  while (!pending_.empty() || writing_) {
    if (!written_all_.WaitUntil(mutex_, until)) break;
  }
  hurry_ = false;
}

LineWriter::Stats LineWriter::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

void LineWriter::Run() {
  NameThread("attend-lines");
  BlockSignalsOfWrites();
  std::string lines;
  lines.reserve(options_.pending_bytes_max);
  MutexLock lock(mutex_);
  for (;;) {
    while (pending_.empty() && give_up_ == kNever) {
      idle_ = true;
      changed_.Wait(mutex_);
      idle_ = false;
    }
    const TimePoint written = TrueTime() + options_.linger;
    while (!hurry_ && give_up_ == kNever && TrueTime() < written) {
      changed_.WaitUntil(mutex_, written);
    }
    if (pending_.empty()) return;  // the end
    lines.clear();
    lines.swap(pending_);
    UniqueFd reopened = std::move(reopened_);
    writing_ = true;
    lock.Unlock();
    if (reopened.valid()) SetFile(std::move(reopened));
    WriteLines(lines);
    SayLost();
    lock.Lock();
    writing_ = false;
    if (pending_.empty()) written_all_.NotifyAll();
  }
}

void LineWriter::WriteLines(std::string_view lines) {
  while (!lines.empty()) {
    const std::string_view piece = FirstLines(lines, regular_ ? kPieceBytes : size_t{PIPE_BUF});
    const size_t written = WritePiece(piece);
    const int64_t whole = CountLines(piece.substr(0, written));
    const MutexLock lock(mutex_);
    stats_.written += whole;
    stats_.lost += CountLines(piece) - whole;
    failing_ = written < piece.size();
    unwritten_bytes_.fetch_sub(static_cast<int64_t>(piece.size()), std::memory_order_release);
    lines.remove_prefix(piece.size());
  }
}

size_t LineWriter::WritePiece(std::string_view piece) {
  if (torn_) torn_ = Write("\n") == 0;
  if (torn_) return 0;
  const size_t written = Write(piece);
  torn_ = written > 0 && piece[written - 1] != '\n';
  return written;
}

size_t LineWriter::Write(std::string_view bytes) {
  size_t written = 0;
  while (written < bytes.size() && WaitUntilWritable()) {
    // POLLOUT promises room for PIPE_BUF bytes: a longer write could block.
    const size_t most = regular_ ? bytes.size() : size_t{PIPE_BUF};
    const ssize_t taken =
        write(file_.get(), bytes.data() + written, std::min(most, bytes.size() - written));
    if (taken > 0) {
      written += static_cast<size_t>(taken);
    } else if (taken < 0 && errno != EINTR && errno != EAGAIN) {
      SetError(errno);
      break;
    }
  }
  return written;
}

bool LineWriter::WaitUntilWritable() {
  if (regular_) return true;
  for (;;) {
    bool over = false;
    {
      const MutexLock lock(mutex_);
      over = give_up_ != kNever && TrueTime() >= give_up_;
    }
    pollfd wait{file_.get(), POLLOUT, 0};
    // Also true on errors, which the write then reports.
    if (poll(&wait, 1, over ? 0 : kLookMs) > 0) return true;
    if (over) {
      SetError(kNoReader);
      return false;
    }
    SayLost();
  }
}

void LineWriter::SetError(int error) {
  const MutexLock lock(mutex_);
  error_ = error;
}

void LineWriter::SayLost() {
  if (!on_lost_) return;
  Lost lost;
  {
    const MutexLock lock(mutex_);
    lost.lines = stats_.lost - std::exchange(said_lost_, stats_.lost);
    if (lost.lines == 0) return;
    lost.error = TextOf(error_);
  }
  on_lost_(lost);
}

LineWriter::Lost LineWriter::TakeLost() {
  const MutexLock lock(mutex_);
  // The line that reports the loss needs room, and a file that accepts it.
  if (failing_ || pending_.size() > options_.pending_bytes_max / 2) return {};
  const int64_t lines = stats_.lost - std::exchange(taken_lost_, stats_.lost);
  if (lines == 0) return {};
  return {lines, TextOf(error_)};
}

}  // namespace attend

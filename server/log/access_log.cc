// SPDX-License-Identifier: Apache-2.0

#include "server/log/access_log.h"

#include <exception>
#include <utility>

#include "server/util/mix.h"

namespace attend {

Result<std::unique_ptr<AccessLog>> AccessLog::Open(const Options& options, Logger& logger,
                                                   const Clock& clock) {
  LineWriter::Options lines;
  lines.name = "access-log";
  lines.path = options.path;
  Result<std::unique_ptr<LineWriter>> writer =
      LineWriter::Open(lines, [&logger](const auto& lost) { logger.LogLost("access-log", lost); });
  if (!writer.ok()) return writer.status();
  return std::unique_ptr<AccessLog>(new AccessLog(options, std::move(*writer), clock));
}

bool AccessLog::Wants(uint64_t id, bool failed, int64_t total_ns) {
  const bool ordinary = !failed && std::chrono::nanoseconds(total_ns) <= options_.slow;
  if (ordinary && !InSample(0, id, options_.sample)) return false;
  if (options_.rate <= 0) return true;
  const MutexLock lock(mutex_);
  if (limit_.Take("call", ordinary ? "ordinary" : "other", clock_.Now()).write) return true;
  ++limited_;
  return false;
}

bool AccessLog::WantsRefused() {
  const MutexLock lock(mutex_);
  if (refused_limit_.Take("call", "refused", clock_.Now()).write) return true;
  ++limited_;
  return false;
}

void AccessLog::Write(std::span<const LogField> fields) try {
  writer_->Push(FormatJsonRecord(std::chrono::system_clock::now(), fields));
} catch (const std::exception&) {
  const MutexLock lock(mutex_);
  ++no_memory_;
}

AccessLog::Stats AccessLog::stats() const {
  const LineWriter::Stats lines = writer_->stats();
  const MutexLock lock(mutex_);
  return {lines.written, lines.lost + no_memory_, limited_};
}

}  // namespace attend

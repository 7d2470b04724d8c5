// SPDX-License-Identifier: Apache-2.0
//
// Writes requests whose reference check failed to disk, for attend-client replay. Each gets a
// directory, <UTC time>-<request id>, with
//   request.binpb   the AttendRequest, rebuilt from what was run
//   response.binpb  the AttendResponse with the wrong O
//   report.json     the check's report, the device and the kernel
// A directory appears complete or not at all. A dump that cannot be written is logged and dropped.
// Dumps are limited in number and rate, and half of them are reserved for requests whose tensors no
// client could change before the check, so that a client that can make checks fail cannot use up
// all of them.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/request/request.h"

namespace attend {

// Sets the small fields that describe the request; `raw` stays empty. The message is equivalent to
// the client's, but not always byte-identical.
void FillRequest(const Request& request, v1::AttendRequest* message);

class Dumper {
 public:
  struct Options {
    std::string directory;
    int64_t dumps_max = 100;
    Duration interval{};  // between two dumps of the same transport and kernel
    uint64_t check_seed = 1;
  };
  // `clock` and `logger` must outlive the object.
  Dumper(Options options, const Clock& clock, Logger& logger);

  // Writes files: not on the transport's loops.
  void Write(const Request& request);

  // Outcomes of Write so far.
  struct Counts {
    std::atomic<int64_t> written{0};
    std::atomic<int64_t> left_out{0};
    std::atomic<int64_t> failed{0};
  };
  const Counts& counts() const { return counts_; }

 private:
  // Takes a place for a dump and returns an empty string, or returns why the dump is skipped.
  std::string TakePlace(const Request& request);
  Result<std::string> WriteDirectory(const Request& request) const;
  Status WriteFiles(const Request& request, const std::string& temporary) const;

  const Options options_;
  const Clock& clock_;
  Logger& logger_;
  Counts counts_;
  Mutex mutex_;
  int64_t dumps_ ATTEND_GUARDED_BY(mutex_) = 0;
  int64_t shared_dumps_ ATTEND_GUARDED_BY(mutex_) = 0;  // requests over shared memory
  std::map<std::pair<Transport, KernelId>, TimePoint> last_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Writes requests whose reference check failed to disk, so that attend-client replay can run them
// again. Each becomes a directory of its own, <UTC time>-<request id>, with
//   request.binpb   the AttendRequest, made again from what was run
//   response.binpb  the AttendResponse with the wrong O
//   report.json     the check's report, the device and the kernel
// A directory appears whole or not at all. What cannot be written is logged and forgotten.

#pragma once

#include <spdlog/logger.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "attend/v1/attention.pb.h"
#include "kernels/status.h"
#include "server/request.h"

namespace attend {

// The small fields that give this request; `raw` stays empty. Equal in meaning, not in every byte,
// to what the client sent.
void FillRequest(const Request& request, v1::AttendRequest* message);

class Dumper {
 public:
  Dumper(std::string directory, int64_t dumps_max, uint64_t check_seed, spdlog::logger& logger);

  // Any thread. Writes files, so not one of gRPC's.
  void Write(const Request& request);

 private:
  Status WriteFiles(const Request& request, const std::string& temporary) const;

  const std::string directory_;
  const int64_t dumps_max_;
  const uint64_t check_seed_;
  spdlog::logger& logger_;
  std::atomic<int64_t> dumps_{0};
};

}  // namespace attend

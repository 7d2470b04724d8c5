// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked requests that further streams may join, by token, and a thread that ends stalled
// uploads. Thread-safe.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/util/poll_thread.h"
#include "server/util/random_token.h"

namespace attend {

struct ChunkedOptions {
  int64_t streams_max = 16;                    // per request
  int64_t chunk_bytes_max = int64_t{4} << 20;  // size of a chunk's data, and of a header
  Duration idle_timeout = std::chrono::seconds(30);
};

class ChunkedTransfer;

class ChunkedRegistry {
 public:
  // `clock` must outlive the registry, and the registry all transfers.
  ChunkedRegistry(const ChunkedOptions& options, const Clock& clock, TokenSource tokens);

  // Returns the token by which Find finds the transfer until it is gone or removed.
  Result<std::string> Add(const std::shared_ptr<ChunkedTransfer>& transfer);
  void Remove(const std::string& token);
  // Null if no transfer has that token.
  std::shared_ptr<ChunkedTransfer> Find(const std::string& token);
  const ChunkedOptions& options() const { return options_; }

 private:
  void EndIdle() ATTEND_EXCLUDES(mutex_);

  const ChunkedOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  Mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<ChunkedTransfer>> transfers_
      ATTEND_GUARDED_BY(mutex_);
  PollThread thread_;
};

}  // namespace attend

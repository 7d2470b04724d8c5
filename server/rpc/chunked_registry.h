// SPDX-License-Identifier: Apache-2.0
//
// The AttendChunked requests that further streams may join, by their tokens, and the thread that
// ends those whose client stopped sending. Thread-safe.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "kernels/util/status.h"
#include "server/util/clock.h"
#include "server/util/random_token.h"

namespace attend {

class ChunkedTransfer;
class TransferRef;

struct ChunkedOptions {
  int64_t streams_max = 16;                    // of one request
  int64_t chunk_bytes_max = int64_t{4} << 20;  // of a chunk's data, and of a header
  Duration idle_timeout = std::chrono::seconds(30);
};

class ChunkedRegistry {
 public:
  // `clock` must outlive the registry.
  ChunkedRegistry(const ChunkedOptions& options, const Clock& clock, TokenSource tokens);
  ~ChunkedRegistry();  // every transfer must have been removed
  ChunkedRegistry(const ChunkedRegistry&) = delete;
  ChunkedRegistry& operator=(const ChunkedRegistry&) = delete;

  // From here to Remove the transfer lives and is found by the token that comes back.
  Result<std::string> Add(ChunkedTransfer& transfer);
  void Remove(const std::string& token);
  // Empty if there is none.
  TransferRef Find(const std::string& token);

  const ChunkedOptions& options() const { return options_; }

 private:
  void Run();
  void EndIdle();

  const ChunkedOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::unordered_map<std::string, ChunkedTransfer*> transfers_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace attend

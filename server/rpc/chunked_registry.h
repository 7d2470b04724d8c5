// SPDX-License-Identifier: Apache-2.0
//
// AttendChunked requests that further streams may join, by token, and a thread that ends stalled
// uploads. Thread-safe.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "kernels/util/thread_name.h"
#include "server/rpc/call.h"
#include "server/util/random_token.h"

namespace attend {

struct ChunkedOptions {
  int64_t streams_max = 16;                    // per request
  int64_t chunk_bytes_max = int64_t{4} << 20;  // size of a chunk's data, and of a header
  Duration idle_timeout = std::chrono::seconds(30);
};

// A registry of ChunkedTransfers. A template, because they use it themselves. A Transfer is a Call
// with EndIfIdle(now).
template <class Transfer>
class TransferRegistry {
 public:
  // `clock` must outlive the registry.
  TransferRegistry(const ChunkedOptions& options, const Clock& clock, TokenSource tokens)
      : options_(options), clock_(clock), tokens_(std::move(tokens)), thread_([this] { Run(); }) {}
  ~TransferRegistry();  // every transfer must have been removed
  TransferRegistry(const TransferRegistry&) = delete;
  TransferRegistry& operator=(const TransferRegistry&) = delete;

  // Returns the token by which Find finds the transfer, which must live until Remove.
  Result<std::string> Add(Transfer& transfer);
  void Remove(const std::string& token);
  // Empty if no transfer has that token.
  CallRef<Transfer> Find(const std::string& token);

  const ChunkedOptions& options() const { return options_; }

 private:
  // Checks per idle timeout: a request ends at most a quarter of it late.
  static constexpr int kLooksPerTimeout = 4;

  void Run();
  void EndIdle() ATTEND_EXCLUDES(mutex_);

  const ChunkedOptions options_;
  const Clock& clock_;
  const TokenSource tokens_;
  Mutex mutex_;
  CondVar wake_;
  std::unordered_map<std::string, Transfer*> transfers_ ATTEND_GUARDED_BY(mutex_);
  bool stop_ ATTEND_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class ChunkedTransfer;
using ChunkedRegistry = TransferRegistry<ChunkedTransfer>;

template <class Transfer>
TransferRegistry<Transfer>::~TransferRegistry() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyOne();
  thread_.join();
}

template <class Transfer>
Result<std::string> TransferRegistry<Transfer>::Add(Transfer& transfer) {
  Result<std::string> token = tokens_();
  if (!token.ok()) return token.status();
  const MutexLock lock(mutex_);
  if (!transfers_.emplace(*token, &transfer).second)
    return Internal("the new token is already in use");
  if (transfers_.size() == 1) wake_.NotifyOne();
  return token;
}

template <class Transfer>
void TransferRegistry<Transfer>::Remove(const std::string& token) {
  const MutexLock lock(mutex_);
  transfers_.erase(token);
}

template <class Transfer>
CallRef<Transfer> TransferRegistry<Transfer>::Find(const std::string& token) {
  const MutexLock lock(mutex_);
  const auto found = transfers_.find(token);
  return found == transfers_.end() ? CallRef<Transfer>() : CallRef<Transfer>(found->second);
}

template <class Transfer>
void TransferRegistry<Transfer>::Run() {
  NameThread("attend-uploads");
  const Duration pause =
      std::max<Duration>(options_.idle_timeout / kLooksPerTimeout, std::chrono::milliseconds(1));
  MutexLock lock(mutex_);
  while (!stop_) {
    if (transfers_.empty()) {
      wake_.Wait(mutex_);
      continue;
    }
    const TimePoint until = clock_.Now() + pause;
    lock.Unlock();
    EndIdle();
    lock.Lock();
    // Adding a transfer wakes the thread too, but does not shorten the pause.
    while (!stop_ && clock_.WaitUntil(wake_, mutex_, until)) {
    }
  }
}

template <class Transfer>
void TransferRegistry<Transfer>::EndIdle() {
  std::vector<CallRef<Transfer>> transfers;
  {
    const MutexLock lock(mutex_);
    for (const auto& [token, transfer] : transfers_) transfers.emplace_back(transfer);
  }
  const TimePoint now = clock_.Now();
  for (const CallRef<Transfer>& transfer : transfers) transfer->EndIfIdle(now);
}

}  // namespace attend

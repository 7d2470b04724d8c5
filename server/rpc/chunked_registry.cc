// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/chunked_registry.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "server/rpc/chunked_transfer.h"

namespace attend {
namespace {

// Checks per idle timeout: a request ends at most a quarter of it late.
constexpr int kLooksPerTimeout = 4;

}  // namespace

ChunkedRegistry::ChunkedRegistry(const ChunkedOptions& options, const Clock& clock,
                                 TokenSource tokens)
    : options_(options),
      clock_(clock),
      tokens_(std::move(tokens)),
      thread_(
          "attend-uploads",
          std::max<Duration>(options.idle_timeout / kLooksPerTimeout, std::chrono::milliseconds(1)),
          clock, [this] { EndIdle(); }) {}

Result<std::string> ChunkedRegistry::Add(const std::shared_ptr<ChunkedTransfer>& transfer) {
  Result<std::string> token = tokens_();
  if (!token.ok()) return token.status();
  const MutexLock lock(mutex_);
  if (!transfers_.emplace(*token, transfer).second)
    return Internal("the new token is already in use");
  return token;
}

void ChunkedRegistry::Remove(const std::string& token) {
  const MutexLock lock(mutex_);
  transfers_.erase(token);
}

std::shared_ptr<ChunkedTransfer> ChunkedRegistry::Find(const std::string& token) {
  const MutexLock lock(mutex_);
  const auto found = transfers_.find(token);
  return found == transfers_.end() ? nullptr : found->second.lock();
}

void ChunkedRegistry::EndIdle() {
  std::vector<std::shared_ptr<ChunkedTransfer>> transfers;
  {
    const MutexLock lock(mutex_);
    for (const auto& [token, transfer] : transfers_) {
      if (auto kept = transfer.lock()) transfers.push_back(std::move(kept));
    }
  }
  const TimePoint now = clock_.Now();
  for (const auto& transfer : transfers) transfer->EndIfIdle(now);
}

}  // namespace attend

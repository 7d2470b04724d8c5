// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/chunked_registry.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"
#include "server/rpc/chunked_transfer.h"

namespace attend {
namespace {

// How often in an idle timeout the thread looks: a request ends at most a quarter too late.
constexpr int kLooksPerTimeout = 4;

}  // namespace

ChunkedRegistry::ChunkedRegistry(const ChunkedOptions& options, const Clock& clock,
                                 TokenSource tokens)
    : options_(options), clock_(clock), tokens_(std::move(tokens)), thread_([this] { Run(); }) {}

ChunkedRegistry::~ChunkedRegistry() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

Result<std::string> ChunkedRegistry::Add(ChunkedTransfer& transfer) {
  Result<std::string> token = tokens_();
  if (!token.ok()) return token.status();
  const std::lock_guard lock(mutex_);
  if (!transfers_.emplace(*token, &transfer).second) return Internal("a token came twice");
  if (transfers_.size() == 1) wake_.notify_one();
  return token;
}

void ChunkedRegistry::Remove(const std::string& token) {
  const std::lock_guard lock(mutex_);
  transfers_.erase(token);
}

TransferRef ChunkedRegistry::Find(const std::string& token) {
  const std::lock_guard lock(mutex_);
  const auto found = transfers_.find(token);
  return found == transfers_.end() ? TransferRef() : TransferRef(found->second);
}

void ChunkedRegistry::Run() {
  NameThread("attend-uploads");
  const Duration pause =
      std::max<Duration>(options_.idle_timeout / kLooksPerTimeout, std::chrono::milliseconds(1));
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (transfers_.empty()) {
      wake_.wait(lock);
      continue;
    }
    wake_.wait_for(lock, pause, [this] { return stop_; });
    lock.unlock();
    EndIdle();
    lock.lock();
  }
}

void ChunkedRegistry::EndIdle() {
  std::vector<TransferRef> transfers;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [token, transfer] : transfers_) transfers.emplace_back(transfer);
  }
  const TimePoint now = clock_.Now();
  for (const TransferRef& transfer : transfers) transfer->EndIfIdle(now);
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The end of Server: finishes accepted requests, waits until clients have read the answers, then
// destroys the parts in order.

#include <algorithm>
#include <chrono>

#include "server/app/server.h"
#include "server/app/server_parts.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kMemoryReturnTimeout = seconds(5);
constexpr Duration kLastBytesReadTime = milliseconds(250);
// After --drain-timeout: time for requests to stop, and for their answers.
constexpr Duration kStopTime = seconds(2);
constexpr Duration kLastAnswersTime = seconds(1);

}  // namespace

bool Server::WaitForCalls(TimePoint until) const {
  while (context_->admitted_calls.load(std::memory_order_acquire) > 0) {
    if (clock_.Now() >= until) return false;
    clock_.SleepFor(milliseconds(1));
  }
  return true;
}

bool Server::StopRunning() {
  logger_->warn("drain timeout: stopping {} requests", engine_->inflight());
  engine_->Abort();
  if (engine_->WaitIdle(clock_.Now() + kStopTime)) return true;
  for (const BusyRequest& each : engine_->Running()) {
    logger_->Log(LogLevel::err, "request held up the drain",
                 {{"id", each.id},
                  {"request_id", each.request_id},
                  {"peer", each.peer},
                  {"doing", each.doing}});
  }
  logger_->error("drain timed out with {} requests unfinished", engine_->inflight());
  return false;
}

bool Server::Drain(Duration timeout) {
  const TimePoint until = clock_.Now() + timeout;
  accepting_->End();
  logger_->info("draining: {} requests to finish", engine_->inflight());
  if (shared_ != nullptr && !shared_->Stop(until)) {
    logger_->error("drain timed out while a shared region was being created");
    FlushObserving();
    return false;
  }
  if (!engine_->WaitIdle(until) && !StopRunning()) {
    FlushObserving();  // spans and lines of requests that have ended
    return false;
  }
  // Every answer exists; give the transport time to send them.
  const TimePoint end = std::max(until, clock_.Now() + kLastAnswersTime);
  const bool sent = WaitForCalls(end);
  if (!sent) {
    for (const std::string& peer : grpc_->WaitingPeers()) {
      logger_->Log(LogLevel::err, "client held up the drain by not reading its answer",
                   {{"peer", peer}});
    }
    logger_->error("drain timed out with answers that clients had not read");
  }
  // The last bytes may be in kernel buffers. If the process ended while a client still sends, the
  // connection would be reset and they would be lost, so give clients a moment to read. Late calls
  // are refused.
  const Duration left = std::max(Duration::zero(), end - clock_.Now());
  clock_.SleepFor(std::min<Duration>(kLastBytesReadTime, left));
  grpc_->RemoveSockets();
  FlushObserving();
  if (sent) logger_->info("drained");
  return sent;
}

Server::~Server() {
  metrics_endpoint_.reset();
  if (callers_ != nullptr) callers_->StopWatching();
  if (engine_ == nullptr) return;
  engine_->Drain();
  {
    const MutexLock lock(serving_mutex_);
    serving_ = nullptr;
  }
  grpc_.reset();
  workers_.reset();
  inference_service_.reset();  // before the registry, of which it has clients
  engine_->Stop();
  chunked_.reset();  // its thread may hold the last reference to a request
  shared_.reset();   // no request is left; before the engine, whose backend locked the pages
  session_memory_.reset();
  // Bytes of answers may outlive their calls for a moment; they are the pool's.
  const TimePoint until = clock_.Now() + kMemoryReturnTimeout;
  while (engine_->host_pool().used_bytes() > 0 && clock_.Now() < until) {
    clock_.SleepFor(milliseconds(1));
  }
  if (engine_->host_pool().used_bytes() > 0) {
    logger_->error("answers still hold {} bytes of memory, which is not freed",
                   engine_->host_pool().used_bytes());
    (void)engine_.release();
  }
}

}  // namespace attend

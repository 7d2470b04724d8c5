// SPDX-License-Identifier: Apache-2.0
//
// State shared by all calls, and the work common to their beginnings and ends.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "kernels/util/mutex.h"
#include "server/auth/caller.h"
#include "server/engine/engine.h"
#include "server/limits/tenant_limits.h"
#include "server/log/access_log.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_log.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/load_report.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/wire_call.h"
#include "server/trace/tracer.h"
#include "server/util/worker_threads.h"
#include "server/wire/message_format.h"

namespace attend {

class Authenticator;
namespace v1 {
class GetServerInfoResponse;
}

// A call that stays open between requests.
class OpenCall {
 public:
  virtual ~OpenCall() = default;
  // Ends the call with UNAVAILABLE once everything accepted on it has been answered.
  virtual void EndWhenIdle() = 0;
  // Ends the call, as its next request would, if its caller has lost rights it had when the call
  // began. Accepted requests are answered first.
  virtual void Recheck() = 0;

 private:
  friend class OpenStreams;
  // Its entry, made here so that OpenStreams::Add cannot fail.
  std::list<OpenCall*> entry_{this};
  std::list<OpenCall*>::iterator at_;  // in OpenStreams
};

// The calls that stay open between requests. Thread-safe.
class OpenStreams {
 public:
  // Returns whether streams must end: then the caller must end this one before it accepts anything.
  bool Add(OpenCall* stream);
  // Call once, before the stream is destroyed.
  void Remove(OpenCall* stream);
  // Ends every stream, present or future, with UNAVAILABLE once its last response has left.
  void EndAll();
  // Call when callers' rights have changed: ends streams that have lost theirs.
  void RecheckAll();
  // Undoes EndAll for new streams.
  void Resume();

 private:
  Mutex mutex_;
  std::list<OpenCall*> streams_ ATTEND_GUARDED_BY(mutex_);
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;
};

// Everything a call uses. Outlives every call.
struct ServiceContext {
  Engine& engine;
  RequestReader& reader;
  Metrics& metrics;
  WorkerThreads& workers;
  CallQueue& queue;  // for small calls
  ChunkedRegistry& chunked;
  const Clock& clock;
  Logger& logger;
  TenantLimits& limits;
  int64_t stream_requests_max;
  // Fills in what the caller may know about the server.
  std::function<void(const Caller&, v1::GetServerInfoResponse*)> fill_info;
  const Authenticator* authenticator;  // null: callers are not authenticated
  AccessLog* access_log;               // null: off
  Tracer* tracer;                      // null: off
  LoadMeter* load;                     // null: off
  std::string server_id;

  OpenStreams streams{};

  std::atomic<uint64_t> next_id{1};
  std::atomic<uint64_t> small_calls{0};  // number of small calls that have ended
  // Calls with an admitted request whose last response has not left yet.
  std::atomic<int64_t> admitted_calls{0};
};

// Makes a request for a message that has just arrived on `responder`'s call.
std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline, const Caller& caller);
// Counts and logs the end of a request. `total_ns` is the time since its arrival. The transport
// reports a client's deadline as a cancellation, so a cancellation at the deadline becomes
// DEADLINE_EXCEEDED, as in the client: this may change the request's status. Keep the span until
// the response is written; null: no span.
std::unique_ptr<OpenSpan> RecordEnd(ServiceContext& context, Request& request, int64_t total_ns,
                                    int64_t response_bytes, const WireCall& call,
                                    const CallFacts& facts,
                                    const MessageFormat& format = AttendFormat());

// Copies the parts of a successful answer that `format` writes to files, then calls `then`: here,
// or on a thread of `workers` if there are many bytes. On failure the request's status says so.
void WriteFiles(WorkerThreads& workers, const MessageFormat& format,
                std::unique_ptr<Request> request,
                const std::function<void(std::unique_ptr<Request>)>& then);

// How a request is answered.
struct RequestEnd {
  Status status;
  OutMessage answer{};    // if it is OK
  Refusal refusal{};      // if not
  std::string answer_id;  // MessageFormat::AnswerId
  std::unique_ptr<OpenSpan> span;
};
// RecordEnd, and the answer. If the request has failed, its memory is free before the client learns
// of it and retries.
RequestEnd EndRequest(ServiceContext& context, std::unique_ptr<Request> request,
                      const WireCall& call, const CallFacts& facts, const MessageFormat& format);
// Counts and logs a call that ends with `status` without a request. Returns the status.
Status RecordRefused(ServiceContext& context, Status status, const WireCall& call,
                     const CallFacts& facts, Transport transport = Transport::kInline);
// How long the client of a refused request should wait before a retry; 0: a retry cannot help.
int64_t RetryAfterMs(const ServiceContext& context, Code code, const Refusal& refusal);
// Sends that delay and the machine-readable details of a refusal to the client.
void AddRefusal(ServiceContext& context, Code code, const Refusal& refusal, const WireCall& call);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// What all calls share, and what is done at the start and at the end of each.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "kernels/util/mutex.h"
#include "server/auth/caller.h"
#include "server/engine/engine.h"
#include "server/limits/connection_holds.h"
#include "server/limits/tenant_limits.h"
#include "server/log/access_log.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_log.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/load_report.h"
#include "server/rpc/request_reader.h"
#include "server/trace/tracer.h"
#include "server/util/worker_threads.h"
#include "server/wire/answer_watch.h"
#include "server/wire/message_format.h"
#include "server/wire/wire_call.h"

namespace attend {

class Authenticator;
namespace v1 {
class GetServerInfoResponse;
}

// A call that stays open between requests.
class OpenCall {
 public:
  virtual ~OpenCall() = default;
  // Ends the call with UNAVAILABLE once everything accepted on it is answered.
  virtual void EndWhenIdle() = 0;
  // Ends the call so as its next request would end it, if its caller may no longer do what it could
  // when the call began. What was accepted is answered first.
  virtual void Recheck() = 0;
};

// The calls that stay open between requests. Thread-safe.
class OpenStreams {
 public:
  // A preallocated entry, so that nothing can fail once the stream is made.
  using Place = std::set<OpenCall*>::node_type;
  static Place MakePlace();

  // Returns whether streams must end: then this one must too, before it accepts anything.
  bool Add(Place place, OpenCall* stream);
  // The stream is about to be destroyed.
  void Remove(OpenCall* stream);
  // Every stream, present or new, ends with UNAVAILABLE once its last answer has left.
  void EndAll();
  // What callers may do has changed: those go that have lost their right.
  void RecheckAll();
  // New streams may stay again.
  void Resume();

 private:
  Mutex mutex_;
  std::set<OpenCall*> streams_ ATTEND_GUARDED_BY(mutex_);
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;
};

// What every call uses. All of it outlives every call.
struct ServiceContext {
  Engine& engine;
  RequestReader& reader;
  Metrics& metrics;
  WorkerThreads& workers;
  CallQueue& queue;  // of small calls
  ChunkedRegistry& chunked;
  AnswerWatch& answers;
  const Clock& clock;
  Logger& logger;
  TenantLimits& limits;
  int64_t stream_requests_max;
  // What a caller is told.
  std::function<void(const Caller&, v1::GetServerInfoResponse*)> fill_info;
  const Authenticator* authenticator;  // null: callers are not authenticated
  // The tenants of Unix sockets that are bound to one, by what their calls' peers have before the
  // last colon.
  std::map<std::string, int, std::less<>> socket_tenants;
  AccessLog* access_log;         // null: off
  Tracer* tracer;                // null: off
  ConnectionHolds* connections;  // null: they are not counted
  LoadMeter* load;               // null: off
  std::string server_id;

  OpenStreams streams{};

  std::atomic<uint64_t> next_id{1};
  std::atomic<uint64_t> small_calls{0};  // that have ended
  // Calls with an admitted request, until their last answer has left.
  std::atomic<int64_t> admitted_calls{0};
};

// Makes a request for a message that has just arrived on `responder`'s call.
std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline);
// Counts and logs the end of a request. `total_ns` is the time since its arrival. The transport
// reports a client's deadline as a cancellation, so a cancellation at the deadline ends with
// DEADLINE_EXCEEDED, as in the client: this may change the request's status. Keep the span until
// the answer is written; null if there is none.
std::unique_ptr<OpenSpan> RecordEnd(ServiceContext& context, Request& request, int64_t total_ns,
                                    int64_t response_bytes, const WireCall& call,
                                    const CallFacts& facts,
                                    const MessageFormat& format = AttendFormat());

// Copies what of a successful answer goes to files, as `format` says, and then calls `then`: here,
// or on a thread of `workers` if that is much. The request's status says if it failed.
void WriteFiles(WorkerThreads& workers, const MessageFormat& format,
                std::unique_ptr<Request> request,
                const std::function<void(std::unique_ptr<Request>)>& then);

// When the client of a refused request should retry; 0 if that is of no use.
int64_t RetryAfterMs(const ServiceContext& context, Code code, const Refusal& refusal);
// Tells the call's client that, and what else a program needs to know of a refused request.
void AddRefusal(ServiceContext& context, Code code, const Refusal& refusal, const WireCall& call);

}  // namespace attend

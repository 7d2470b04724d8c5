// SPDX-License-Identifier: Apache-2.0
//
// What all calls share, and what is done at the beginning and at the end of each.

#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "server/engine/engine.h"
#include "server/log/logging.h"
#include "server/memory/copy_pool.h"
#include "server/metrics/metrics.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/intake.h"
#include "server/wire/answer_watch.h"

namespace attend {

namespace v1 {
class GetServerInfoResponse;
}

// A call that stays open between requests.
class OpenCall {
 public:
  virtual ~OpenCall() = default;
  // Ends the call with UNAVAILABLE once nothing that was accepted on it is unanswered.
  virtual void EndWhenIdle() = 0;
};

// The calls that stay open between requests. Thread-safe.
class OpenStreams {
 public:
  // For one of them, so that nothing can fail once it is made.
  using Place = std::set<OpenCall*>::node_type;
  static Place MakePlace();

  // Whether streams are to end: so is this one, before it takes anything.
  bool Add(Place place, OpenCall* stream);
  // A stream that is about to go.
  void Remove(OpenCall* stream);
  // Every stream, present or new, ends with UNAVAILABLE once its last answer has left.
  void EndAll();

 private:
  std::mutex mutex_;
  std::set<OpenCall*> streams_;
  bool ending_ = false;
};

// What every call uses. All of it outlives every call.
struct ServiceContext {
  Engine& engine;
  Intake& intake;
  Metrics& metrics;
  CopyPool& copies;
  ChunkedRegistry& chunked;
  AnswerWatch& answers;
  const Clock& clock;
  Logger& logger;
  int64_t stream_requests_max = 64;
  std::function<void(v1::GetServerInfoResponse*)> fill_info;

  OpenStreams streams{};

  std::atomic<uint64_t> next_id{1};
  // Calls of which a request was admitted, until gRPC has sent their last answer.
  std::atomic<int64_t> admitted_calls{0};
};

// A request for a message that has just arrived on `responder`'s call.
std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline);
// The call's deadline on the server's clock; kNever if it has none.
TimePoint DeadlineOf(const ServiceContext& context, const grpc::CallbackServerContext& call);

// The tenant whose call it is, from its metadata.
int TenantOf(const ServiceContext& context, const grpc::CallbackServerContext& call);

// Counts and logs the end of a request. `total_ns` is since its arrival. gRPC tells of a client's
// deadline by a cancellation, so one that came with it ends with DEADLINE_EXCEEDED, which is what
// the client has: the request's status may change.
void RecordEnd(ServiceContext& context, Request& request, int64_t total_ns, int64_t response_bytes,
               const grpc::CallbackServerContext& call);

// Tells the client of a call that it may try again, and when, if `code` says so.
void AddRetryPushback(ServiceContext& context, Code code, grpc::CallbackServerContext& call);
// How a call ends that nothing is known of but that there is no memory for it.
grpc::Status NoMemory();

}  // namespace attend

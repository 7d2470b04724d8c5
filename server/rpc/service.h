// SPDX-License-Identifier: Apache-2.0
//
// AttentionService on gRPC's callback API. The data methods take and give raw buffers; one reactor
// stands for one call and deletes itself. gRPC's threads enter here and never wait.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

#include "attend/v1/attention.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/log/logging.h"
#include "server/memory/copy_pool.h"
#include "server/metrics/metrics.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/intake.h"
#include "server/wire/answer_watch.h"

namespace attend {

// A call that stays open between requests.
class OpenCall {
 public:
  virtual ~OpenCall() = default;
  // Ends the call with UNAVAILABLE once nothing that was accepted on it is unanswered.
  virtual void EndWhenIdle() = 0;
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

  std::atomic<uint64_t> next_id{1};
  // Calls of which a request was admitted, until gRPC has sent their last answer.
  std::atomic<int64_t> admitted_calls{0};
};

// Calls of methods that there are not: each is refused, counted and logged.
class UnknownMethods final : public grpc::CallbackGenericService {
 public:
  explicit UnknownMethods(ServiceContext& context) : context_(context) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* call) override;

 private:
  ServiceContext& context_;
};

// A request for a message that has just arrived on `responder`'s call.
std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline);
// The call's deadline on the steady clock; kNever if it has none.
TimePoint DeadlineOf(const grpc::CallbackServerContext& context);

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

class AttentionServiceImpl final
    : public v1::AttentionService::WithRawCallbackMethod_Attend<
          v1::AttentionService::WithRawCallbackMethod_AttendStream<
              v1::AttentionService::WithRawCallbackMethod_AttendChunked<
                  v1::AttentionService::WithRawCallbackMethod_GetServerInfo<
                      v1::AttentionService::Service>>>> {
 public:
  using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  explicit AttentionServiceImpl(ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* call,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  Stream* AttendStream(grpc::CallbackServerContext* call) override;
  Stream* AttendChunked(grpc::CallbackServerContext* call) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;

  // Every stream, present or new, ends with UNAVAILABLE once its last answer has left.
  void EndStreams();
  // A stream that is about to go.
  void Remove(OpenCall* stream);

 private:
  // Begins the stream that `make` makes, and ends it if streams no longer are wanted.
  template <class Make>
  Stream* Open(const Make& make);

  ServiceContext& context_;
  std::mutex mutex_;
  std::set<OpenCall*> streams_;
  bool ending_streams_ = false;
};

}  // namespace attend

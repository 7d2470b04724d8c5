// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/service.h"

#include <google/protobuf/arena.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "server/memory/memory_reserve.h"
#include "server/rpc/chunked_stream.h"
#include "server/rpc/stream_call.h"
#include "server/wire/grpc_status.h"
#include "server/wire/reply_codec.h"

namespace attend {
namespace {

// More than GetServerInfoRequest has, for fields of its future.
constexpr int64_t kInfoBytesMax = 4096;
constexpr char kRetryPushbackKey[] = "grpc-retry-pushback-ms";

// One Attend call: made by the handler, deleted when gRPC is done with it and intake has let go.
class UnaryCall final : public grpc::ServerUnaryReactor, public Call {
 public:
  UnaryCall(ServiceContext& context, grpc::CallbackServerContext& call, grpc::ByteBuffer& response)
      : context_(context),
        call_(call),
        response_(response),
        request_(NewRequest(context_, *this, DeadlineOf(call_))),
        id_(request_->id) {
    request_->tenant = TenantOf(context_, call_);
    request_->may_end_in_submit = true;
  }

  void Begin(grpc::ByteBuffer message) {
    std::unique_ptr<Request> request = std::move(request_);
    if (!message.Valid()) return EndWithoutMessage(std::move(request));
    context_.intake.Accept(*this, std::move(request), std::move(message));
  }

  void OnAdmitted(uint64_t) override {
    context_.admitted_calls.fetch_add(1, std::memory_order_relaxed);
    admitted_.store(true, std::memory_order_seq_cst);
  }

  void Finish(std::unique_ptr<Request> request) override {
    const int64_t total_ns = NanosecondsBetween(request->received, context_.clock.Now());
    const int64_t bytes = request->status.ok() ? AnswerBytes(*request) : 0;
    RecordEnd(context_, *request, total_ns, bytes, call_);
    Status status = request->status;
    if (status.ok()) {
      watched_->Join(context_.answers, call_.c_call());
      watched_->Hold(1);  // until OnDone
      try {
        const OnNoMemory no_memory(OnNoMemory::kThrow);
        response_ = EncodeReply(std::move(request), total_ns, watched_);
      } catch (const std::bad_alloc&) {
        status = ResourceExhausted("there is no memory for the answer");
      }
    }
    if (status.ok()) return grpc::ServerUnaryReactor::Finish(grpc::Status::OK);
    request.reset();  // its memory before the client hears of it and tries again
    AddRetryPushback(context_, status.code(), call_);
    grpc::ServerUnaryReactor::Finish(ToGrpc(status));
  }

  std::string Peer() const override { return call_.peer(); }

  void OnCancel() override {
    SetCancelled();
    if (admitted_.load(std::memory_order_seq_cst)) context_.engine.Cancel(id_);
  }

  void OnDone() override {
    watched_->Leave();
    if (unread_ != nullptr) RecordUnread();
    if (admitted_.load(std::memory_order_relaxed)) {
      context_.admitted_calls.fetch_sub(1, std::memory_order_release);
    }
    Unref();
  }

  // OnDone and OnCancel are short and wait for nothing, so gRPC may call them where it is. Else it
  // wakes a thread of its executor for every call, which took a quarter of the server's CPU time
  // under small requests.
  bool InternalInlineable() override { return true; }

 private:
  ~UnaryCall() override = default;

  // gRPC hands over a call without a message if its client sent none, and also if the client went,
  // or gRPC cut it off, before the message was whole. Only the first is there to hear an answer;
  // which it was, nobody knows before OnDone.
  void EndWithoutMessage(std::unique_ptr<Request> request) {
    unread_ = std::move(request);
    unread_->status = InvalidArgument("the call has no message");
    grpc::ServerUnaryReactor::Finish(ToGrpc(unread_->status));
  }
  void RecordUnread() {
    if (call_.IsCancelled()) {
      unread_->status = Status(Code::kCancelled, "the call ended before its message was whole");
    } else {
      unread_->status = context_.intake.Reject(Rejection::kInvalid, std::move(unread_->status));
    }
    RecordEnd(context_, *unread_, NanosecondsBetween(unread_->received, context_.clock.Now()), 0,
              call_);
  }

  ServiceContext& context_;
  grpc::CallbackServerContext& call_;
  grpc::ByteBuffer& response_;
  const WatchedRef watched_ = std::make_shared<WatchedCall>();
  std::unique_ptr<Request> request_;  // until Begin
  const uint64_t id_;
  std::atomic<bool> admitted_{false};
  std::unique_ptr<Request> unread_;  // of a call without a message
};

// Whether a cancellation that comes now is a client's deadline that passes. Clients count from when
// they send, the server from when it reads, so theirs pass earlier, under load by some 10 ms.
bool CancelledLate(const Request& request, TimePoint now) {
  if (request.deadline == kNever) return false;
  constexpr Duration kLeast = std::chrono::milliseconds(20);
  const Duration allowed = request.deadline - request.received;
  return request.deadline - now <= std::max(kLeast, allowed / 4);
}

// Log lines name who asked only when something is to be logged: peer() builds a string.
void LogEnd(ServiceContext& context, const Request& request, int64_t total_ns,
            const grpc::CallbackServerContext& call) {
  const LogLevel level = request.status.ok() ? LogLevel::debug : LogLevel::warn;
  if (!context.logger.should_log(level)) return;
  const std::string& tenant = context.engine.options().tenants.list()[request.tenant].name;
  const std::string peer = call.peer();
  if (!request.status.ok()) {
    const std::string_view code = CodeName(request.status.code());
    context.logger.Log(level, "request failed",
                       {{"id", request.id},
                        {"request_id", request.request_id},
                        {"code", code},
                        {"error", request.status.message()},
                        {"tenant", tenant},
                        {"peer", peer}},
                       code);
    return;
  }
  context.logger.Log(level, "request done",
                     {{"id", request.id},
                      {"request_id", request.request_id},
                      {"tenant", tenant},
                      {"problem", Describe(request.attention.problem)},
                      {"kernel", KernelName(request.selection.kernel)},
                      {"device", request.device_name},
                      {"batch_requests", request.batch_requests},
                      {"queue_us", NanosecondsBetween(request.enqueued, request.started) / 1000},
                      {"kernel_us", request.kernel_ns / 1000},
                      {"total_us", total_ns / 1000},
                      {"peer", peer}});
}

}  // namespace

std::unique_ptr<Request> NewRequest(ServiceContext& context, Responder& responder,
                                    TimePoint deadline) {
  auto request = std::make_unique<Request>();
  request->id = context.next_id.fetch_add(1, std::memory_order_relaxed);
  request->received = context.clock.Now();
  request->deadline = deadline;
  request->responder = &responder;
  return request;
}

TimePoint DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return kNever;
  const auto left = deadline - std::chrono::system_clock::now();
  const TimePoint now = std::chrono::steady_clock::now();
  // Far deadlines would overflow the sum.
  if (left > std::chrono::hours(24 * 365)) return kNever;
  return now + std::chrono::duration_cast<Duration>(left);
}

int TenantOf(const ServiceContext& context, const grpc::CallbackServerContext& call) {
  const Tenants& tenants = context.engine.options().tenants;
  if (tenants.single()) return 0;  // reading metadata makes a map of it
  const auto& metadata = call.client_metadata();
  const auto found = metadata.find(kTenantMetadataKey);
  if (found == metadata.end()) return 0;
  return tenants.Find({found->second.data(), found->second.size()});
}

void RecordEnd(ServiceContext& context, Request& request, int64_t total_ns, int64_t response_bytes,
               const grpc::CallbackServerContext& call) {
  if (request.status.code() == Code::kCancelled && CancelledLate(request, context.clock.Now())) {
    request.status = Status(Code::kDeadlineExceeded,
                            "the client's deadline passed: " + request.status.message());
  }
  context.metrics.RecordFinished(request, total_ns, response_bytes);
  LogEnd(context, request, total_ns, call);
}

grpc::Status NoMemory() { return {grpc::StatusCode::RESOURCE_EXHAUSTED, "no memory"}; }

void AddRetryPushback(ServiceContext& context, Code code, grpc::CallbackServerContext& call) {
  if (!IsRetryable(code)) return;
  call.AddTrailingMetadata(kRetryPushbackKey, std::to_string(context.engine.RetryAfterMs(code)));
}

grpc::ServerUnaryReactor* AttentionServiceImpl::Attend(grpc::CallbackServerContext* call,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  UnaryCall* unary = nullptr;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    unary = new UnaryCall(context_, *call, *response);
  } catch (const std::bad_alloc&) {
    grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
    reactor->Finish(NoMemory());
    return reactor;
  }
  // gRPC keeps its buffer until the call ends; taking it lets the slices go before the kernel runs.
  // The object itself is not const: gRPC made it for this call.
  grpc::ByteBuffer message;
  message.Swap(const_cast<grpc::ByteBuffer*>(request));
  unary->Begin(std::move(message));
  return unary;
}

// A stream that there is no memory for.
class NoMemoryStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  NoMemoryStream() { Finish(NoMemory()); }
  void OnDone() override { delete this; }
};

template <class Make>
AttentionServiceImpl::Stream* AttentionServiceImpl::Open(const Make& make) {
  std::set<OpenCall*> one;
  std::invoke_result_t<Make> stream = nullptr;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    one.insert(nullptr);  // the stream's place, so that nothing can fail once it is made
    stream = make();
  } catch (const std::bad_alloc&) {
    return new NoMemoryStream();
  }
  auto place = one.extract(one.begin());
  place.value() = stream;
  bool ending = false;
  {
    const std::lock_guard lock(mutex_);
    streams_.insert(std::move(place));
    ending = ending_streams_;
  }
  // First, so that nothing of a stream that comes during a drain is taken.
  if (ending) stream->EndWhenIdle();
  stream->Begin();
  return stream;
}

AttentionServiceImpl::Stream* AttentionServiceImpl::AttendStream(
    grpc::CallbackServerContext* call) {
  return Open([&] { return new StreamCall(context_, *this, *call); });
}

AttentionServiceImpl::Stream* AttentionServiceImpl::AttendChunked(
    grpc::CallbackServerContext* call) {
  return Open([&] { return ChunkedStream::Make(context_, *this, *call); });
}

grpc::ServerUnaryReactor* AttentionServiceImpl::GetServerInfo(grpc::CallbackServerContext* call,
                                                              const grpc::ByteBuffer* request,
                                                              grpc::ByteBuffer* response) {
  grpc::ServerUnaryReactor* const reactor = call->DefaultReactor();
  // Its request has no field, so there is nothing to parse.
  if (static_cast<int64_t>(request->Length()) > kInfoBytesMax) {
    reactor->Finish(
        ToGrpc(InvalidArgument("the message has " + std::to_string(request->Length()) +
                               " bytes, must have at most " + std::to_string(kInfoBytesMax))));
    return reactor;
  }
  if (MemoryIsShort()) {
    reactor->Finish(NoMemory());
    return reactor;
  }
  grpc::Status status;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    google::protobuf::Arena arena;  // Protobuf's messages lose what they hold where one fails
    auto* const info = google::protobuf::Arena::CreateMessage<v1::GetServerInfoResponse>(&arena);
    context_.fill_info(info);
    bool own = false;
    status = grpc::SerializationTraits<v1::GetServerInfoResponse>::Serialize(*info, response, &own);
  } catch (const std::bad_alloc&) {
    status = NoMemory();
  }
  reactor->Finish(status);
  return reactor;
}

grpc::ServerGenericBidiReactor* UnknownMethods::CreateReactor(
    grpc::GenericCallbackServerContext* call) {
  class Refusal final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Refusal(const Status& status) { Finish(ToGrpc(status)); }
    void OnDone() override { delete this; }
  };
  Request request;
  try {
    const OnNoMemory no_memory(OnNoMemory::kThrow);
    request.id = context_.next_id.fetch_add(1, std::memory_order_relaxed);
    request.received = context_.clock.Now();
    request.tenant = TenantOf(context_, *call);
    request.status = context_.intake.Reject(Rejection::kUnknownMethod,
                                            Unimplemented("there is no method " + call->method()));
    RecordEnd(context_, request, 0, 0, *call);
  } catch (const std::bad_alloc&) {
    if (request.status.ok()) request.status = ResourceExhausted("no memory");
  }
  return new Refusal(request.status);
}

void AttentionServiceImpl::EndStreams() {
  std::lock_guard lock(mutex_);
  ending_streams_ = true;
  // Under the lock, so that no stream is deleted meanwhile: Remove() waits.
  for (OpenCall* stream : streams_) stream->EndWhenIdle();
}

void AttentionServiceImpl::Remove(OpenCall* stream) {
  const std::lock_guard lock(mutex_);
  streams_.erase(stream);
}

}  // namespace attend

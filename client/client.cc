// SPDX-License-Identifier: Apache-2.0

#include "client/client.h"

#include <algorithm>
#include <atomic>

#include "attend/v1/attention.grpc.pb.h"
#include "client/call/server_address.h"
#include "client/call/token.h"
#include "client/rpc/chunked_op.h"
#include "client/rpc/connections.h"
#include "client/rpc/control_call.h"
#include "client/rpc/stream_op.h"
#include "client/rpc/unary_op.h"
#include "kernels/util/mutex.h"

namespace attend::client {
namespace {

constexpr int kConnectionsMax = 1024;
// HTTP/2's initial window. A smaller message is sent without waiting for the server, so asking for
// the limits first would save nothing.
constexpr int64_t kAskForLimitsBytes = int64_t{64} << 10;
constexpr std::chrono::seconds kAskForLimitsMax{5};
// Servers close connections that ping more often.
constexpr std::chrono::nanoseconds kKeepaliveMin = std::chrono::seconds(1);
constexpr std::chrono::nanoseconds kKeepaliveTimeoutMin = std::chrono::milliseconds(100);

std::string MsText(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count());
}

// Call waits on this for the answer and for gRPC's last use of the caller's memory.
class Waiter {
 public:
  void Answered(CallOutcome outcome) {
    const MutexLock lock(mutex_);
    outcome_ = std::move(outcome);
    answered_ = true;
    changed_.NotifyOne();
  }
  void Released() {
    const MutexLock lock(mutex_);
    released_ = true;
    changed_.NotifyOne();
  }
  CallOutcome Wait() {
    const MutexLock lock(mutex_);
    while (!answered_ || !released_) changed_.Wait(mutex_);
    return std::move(outcome_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool answered_ ATTEND_GUARDED_BY(mutex_) = false;
  bool released_ ATTEND_GUARDED_BY(mutex_) = false;
  CallOutcome outcome_ ATTEND_GUARDED_BY(mutex_);
};

// The two messages of grpc.health.v1.Health/Check have one field each, so they are encoded by hand:
// request {string service = 1}, response {enum status = 1}.
grpc::ByteBuffer HealthRequest(const std::string& service) {
  std::string bytes;
  if (!service.empty()) {
    bytes.push_back(0x0a);
    size_t size = service.size();
    for (; size >= 0x80; size >>= 7) bytes.push_back(static_cast<char>(size | 0x80));
    bytes.push_back(static_cast<char>(size));
    bytes += service;
  }
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

Result<Health> HealthOf(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.DumpToSingleSlice(&slice).ok()) return Internal("health answer is unreadable");
  if (slice.size() == 0) return Health::kUnknown;
  if (slice.size() != 2 || slice.begin()[0] != 0x08 || slice.begin()[1] > 3) {
    return Internal("the server's answer is not a valid grpc.health.v1.HealthCheckResponse");
  }
  return static_cast<Health>(slice.begin()[1]);
}

}  // namespace

struct Client::Impl {
  Impl(const ClientOptions& options, const std::string& target,
       std::shared_ptr<const TlsClient> tls, std::string token, uint64_t seed)
      : chunked_bytes_min(options.chunked_bytes_min),
        on_this_host(IsOnThisHost(target)),
        retry(options.retry),
        pool({target, std::move(tls), options.connections, options.completion_threads,
              std::move(token), options.traceparent, options.keepalive_time,
              options.keepalive_timeout},
             options.clock != nullptr ? *options.clock : steady_clock),
        ids(seed),
        next_seed(seed),
        message_bytes_max(options.message_bytes_max),
        control_generic(pool.control()) {}

  MessageBounds bounds() const {
    return {chunked_bytes_min, message_bytes_max.load(std::memory_order_relaxed)};
  }
  // Sends the call in the form it was encoded for: chunked or one message.
  std::shared_ptr<Operation> Send(std::shared_ptr<const EncodedCall> call, std::string_view id,
                                  const CallOptions& options, CallCallback callback);

  const int64_t chunked_bytes_min;
  const bool on_this_host;
  std::atomic<bool> chunks_refused = false;  // the server answered UNIMPLEMENTED
  RetryPolicy retry;
  const SteadyClock steady_clock;
  ConnectionPool pool;
  RequestIds ids;
  std::atomic<uint64_t> next_seed;
  std::atomic<int64_t> message_bytes_max;  // 0: unknown
  grpc::GenericStub control_generic;
};

std::shared_ptr<Operation> Client::Impl::Send(std::shared_ptr<const EncodedCall> call,
                                              std::string_view id, const CallOptions& options,
                                              CallCallback callback) {
  const uint64_t op_seed = next_seed.fetch_add(1, std::memory_order_relaxed);
  if (call->as_message() != nullptr && chunks_refused.load(std::memory_order_relaxed)) {
    call = call->as_message();
  }
  if (call->chunked() != nullptr) {
    auto op = std::make_shared<ChunkedOp>(&pool, *call, id, options, retry, op_seed,
                                          &chunks_refused, std::move(callback));
    call.reset();
    op->Start();
    return op;
  }
  auto op = std::make_shared<UnaryOp>(&pool, std::move(call), id, options, retry, op_seed,
                                      std::move(callback));
  op->Start();
  return op;
}

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Client>> Client::Make(const ClientOptions& options) {
  Result<std::string> target = ServerTarget(options.server);
  if (!target.ok()) return target.status();
  Result<std::string> token = TokenOf(options.token);
  if (!token.ok()) return token.status();
  Result<std::shared_ptr<const TlsClient>> tls = TlsClient::Make(options.tls, *target);
  if (!tls.ok()) return tls.status();
  if (*tls == nullptr) ATTEND_RETURN_IF_ERROR(CheckTokenStays(*token, *target));
  if (options.connections < 1 || options.connections > kConnectionsMax) {
    return InvalidArgument("connections is " + std::to_string(options.connections) +
                           ", must be in [1, " + std::to_string(kConnectionsMax) + "]");
  }
  if (options.message_bytes_max < 0) {
    return InvalidArgument("message_bytes_max is " + std::to_string(options.message_bytes_max) +
                           ", must be at least 0");
  }
  if (options.completion_threads < 0) {
    return InvalidArgument("completion_threads is " + std::to_string(options.completion_threads) +
                           ", must be at least 0");
  }
  for (const auto& [name, time, least] :
       {std::tuple{"keepalive_time", options.keepalive_time, kKeepaliveMin},
        std::tuple{"keepalive_timeout", options.keepalive_timeout, kKeepaliveTimeoutMin}}) {
    if (time >= least) continue;
    return InvalidArgument(std::string(name) + " is " + MsText(time) + " ms, must be at least " +
                           MsText(least));
  }
  if (options.retry.attempts_max < 1) {
    return InvalidArgument("retry attempts_max is " + std::to_string(options.retry.attempts_max) +
                           ", must be at least 1");
  }
  ATTEND_RETURN_IF_ERROR(CheckTraceParent(options.traceparent));
  const uint64_t seed = options.seed != 0 ? options.seed : SystemSeed();
  return std::unique_ptr<Client>(new Client(
      std::make_unique<Impl>(options, *target, std::move(*tls), std::move(*token), seed)));
}

Client::~Client() { Close(); }

void Client::Close() { impl_->pool.Close(); }

void Client::AskForLimits(const AttentionCall& call, CallOptions* options) {
  if (impl_->message_bytes_max > 0 || PayloadBytes(call) + AnswerBytes(call) < kAskForLimitsBytes) {
    return;
  }
  const TimePoint start = clock().Now();
  const bool bounded = options->timeout.count() > 0;
  const auto info =
      GetServerInfo(bounded ? std::min<std::chrono::nanoseconds>(options->timeout, kAskForLimitsMax)
                            : kAskForLimitsMax);
  // A server without GetServerInfo has no bound that could be known here. An unreachable one is
  // asked again before the next call; this call will report the failure.
  if (!info.ok() && info.status().code() == Code::kUnimplemented) {
    impl_->message_bytes_max = INT64_MAX;
  }
  if (!bounded) return;
  options->timeout -= clock().Now() - start;
  options->timeout = std::max(options->timeout, std::chrono::nanoseconds(1));
}

Result<AttentionResult> Client::Call(const AttentionCall& call, const CallOptions& options) {
  CallOutcome outcome = CallAndWait(call, options);
  if (!outcome.status.ok()) return outcome.status;
  return std::move(outcome.result);
}

CallOutcome Client::CallAndWait(const AttentionCall& call, const CallOptions& call_options) {
  Status refused = Check(call_options, UsesSharedMemory(call));
  if (refused.ok() && impl_->pool.IsHere()) {
    refused = Status(Code::kFailedPrecondition,
                     "a callback must not wait for a call: it runs on a thread to which answers "
                     "come, so start the call with CallAsync");
  }
  if (!refused.ok()) return {.status = std::move(refused)};
  CallOptions options = call_options;
  AskForLimits(call, &options);
  const auto waiter = std::make_shared<Waiter>();
  // Every payload slice holds this, so it is released with gRPC's last use of the caller's memory.
  std::shared_ptr<const void> keep_alive(nullptr, [waiter](const void*) { waiter->Released(); });
  Result<EncodedCall> encoded =
      EncodeCall(call, options.transport, impl_->bounds(), std::move(keep_alive));
  if (!encoded.ok()) return {.status = encoded.status()};
  auto shared = std::make_shared<const EncodedCall>(std::move(*encoded));
  const std::string id =
      call.request_id.empty() ? std::string(impl_->ids.Next().view()) : call.request_id;
  impl_->Send(std::move(shared), id, options,
              [waiter](CallOutcome outcome) { waiter->Answered(std::move(outcome)); });
  CallOutcome outcome = waiter->Wait();
  if (!outcome.status.ok()) outcome.status = impl_->pool.Explain(std::move(outcome.status));
  return outcome;
}

CallHandle Client::CallAsync(const AttentionCall& call, const CallOptions& options,
                             CallCallback callback) {
  Result<EncodedCall> encoded = EncodeCall(call, options.transport, impl_->bounds());
  if (!encoded.ok()) {
    callback({.status = encoded.status()});
    return CallHandle();
  }
  return CallAsync(std::make_shared<const EncodedCall>(std::move(*encoded)), call.request_id,
                   options, std::move(callback));
}

CallHandle Client::CallAsync(const std::shared_ptr<const EncodedCall>& call,
                             std::string_view request_id, const CallOptions& options,
                             CallCallback callback) {
  Status refused = Check(options, call->uses_shared_memory());
  if (refused.ok() && !call->owned()) {
    refused = InvalidArgument(
        "a tensor has no owner; an asynchronous call sends from memory that it can keep alive");
  }
  if (refused.ok()) refused = call->CheckMessageBytes(impl_->bounds().message_bytes_max);
  if (!refused.ok()) {
    callback({.status = std::move(refused)});
    return CallHandle();
  }
  const RequestIds::Id made = request_id.empty() ? impl_->ids.Next() : RequestIds::Id{};
  return CallHandle(impl_->Send(call, request_id.empty() ? made.view() : request_id, options,
                                std::move(callback)));
}

std::unique_ptr<Stream> Client::OpenStream(const StreamOptions& options) {
  auto op =
      std::make_shared<StreamOp>(&impl_->pool, options, &impl_->ids, &impl_->message_bytes_max);
  op->Start();
  return std::make_unique<Stream>(std::move(op));
}

Status Client::Check(const CallOptions& options, bool shared_memory) const {
  ATTEND_RETURN_IF_ERROR(CheckNames(options.tenant, options.traceparent));
  ATTEND_RETURN_IF_ERROR(impl_->pool.CheckServer(options.server));
  if (!shared_memory || !several() || !options.server.empty()) return Status();
  return InvalidArgument(
      "the client has several servers, and a call over shared memory must name "
      "the one whose memory it is (CallOptions::server)");
}

Result<v1::GetServerInfoResponse> Client::GetServerInfo(std::chrono::nanoseconds timeout,
                                                        std::string* server) {
  v1::GetServerInfoResponse response;
  Status status(Code::kUnavailable, "");
  // With several servers, first one that serves, then any that answers.
  std::vector<std::shared_ptr<grpc::Channel>> channels = {impl_->pool.control()};
  if (several()) channels.insert(channels.begin(), impl_->pool.control_in_turn());
  for (const std::shared_ptr<grpc::Channel>& channel : channels) {
    if (status.code() != Code::kUnavailable) break;
    const auto call =
        std::make_shared<ControlCall<v1::GetServerInfoResponse>>(impl_->pool, timeout);
    impl_->pool.Introduce("", "", call->context());
    const auto stub = v1::AttentionService::NewStub(channel);
    ControlOutcome outcome =
        call->Make([&](auto* context,
                       auto* queue) { return stub->PrepareAsyncGetServerInfo(context, {}, queue); },
                   &response);
    status = std::move(outcome.status);
    if (status.ok() && server != nullptr) *server = std::move(outcome.server);
  }
  if (!status.ok()) return impl_->pool.Explain(std::move(status));
  const int64_t bytes_max = response.limits().request_bytes_max();
  impl_->message_bytes_max = bytes_max > 0 ? bytes_max : INT64_MAX;
  return response;
}

Result<Health> Client::CheckHealth(const std::string& service, std::chrono::nanoseconds timeout) {
  const auto call = std::make_shared<ControlCall<grpc::ByteBuffer>>(impl_->pool, timeout);
  const grpc::ByteBuffer request = HealthRequest(service);
  grpc::ByteBuffer response;
  ControlOutcome outcome = call->Make(
      [&](auto* context, auto* queue) {
        return impl_->control_generic.PrepareUnaryCall(context, "/grpc.health.v1.Health/Check",
                                                       request, queue);
      },
      &response);
  if (!outcome.status.ok()) return impl_->pool.Explain(std::move(outcome.status));
  return HealthOf(response);
}

int Client::connections() const { return impl_->pool.size(); }

bool Client::several() const { return impl_->pool.several(); }

std::shared_ptr<grpc::Channel> Client::control() const { return impl_->pool.control(); }

const std::string& Client::token() const { return impl_->pool.token(); }

Result<SharedSocket> Client::FindSharedMemory(const v1::GetServerInfoResponse& info,
                                              const std::string& named,
                                              const std::string& server) const {
  if (!info.has_shared_memory()) {
    return Status(Code::kFailedPrecondition,
                  "shared memory is off on this server; its --shared-memory turns it on");
  }
  if (!named.empty()) return SharedSocket{named, true};
  if (!(server.empty() ? impl_->on_this_host : IsOnThisHost(server))) {
    return Status(Code::kFailedPrecondition,
                  "the server's address is neither loopback nor a Unix socket, so the path of its "
                  "shared memory is not followed: name the socket if the server is on this host");
  }
  return SharedSocket{info.shared_memory().socket()};
}

const ConnectionPool& Client::pool() const { return impl_->pool; }

const Clock& Client::clock() const { return impl_->pool.clock(); }

RetryState Client::MakeRetryState() {
  return RetryState(impl_->retry, impl_->next_seed.fetch_add(1, std::memory_order_relaxed));
}

void CallHandle::Cancel() {
  const std::shared_ptr<Operation> op = op_.lock();
  if (op == nullptr) return;
  if (request_.empty()) {
    op->Cancel();
  } else {
    op->CancelRequest(request_, serial_);
  }
}

}  // namespace attend::client

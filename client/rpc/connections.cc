// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/connections.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "kernels/util/thread_name.h"

namespace attend::client {
namespace {

// Between attempts to connect; gRPC takes no less than the first.
constexpr int kBackoffMinMs = 100;
constexpr int kBackoffMaxMs = 2000;
// Far and busy servers take their time. A host that drops packets holds calls up as long.
constexpr int kConnectMaxMs = 5000;

// Connecting once more, to find out what is wrong.
constexpr std::chrono::milliseconds kDiagnosisMax{2000};

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& server, const TlsClient* tls,
                                           bool with_token) {
  grpc::ChannelArguments args;
  // A proxy ($http_proxy) would read the token.
  if (with_token) args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Channels with equal arguments share one socket unless each has its own pool.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // gRPC's own retries would buffer every message; retry_policy.h does them.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kBackoffMinMs);
  // By its name a pause, but gRPC takes it for the time that connecting may take.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMaxMs);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kBackoffMaxMs);
  args.SetMaxReceiveMessageSize(-1);
  args.SetMaxSendMessageSize(-1);
  if (tls == nullptr) {
    return grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), args);
  }
  if (!tls->server_name().empty()) args.SetSslTargetNameOverride(tls->server_name());
  return grpc::CreateCustomChannel(server, tls->Credentials(), args);
}

}  // namespace

CompletionLoop::CompletionLoop() : thread_([this] { Run(); }) {}

CompletionLoop::~CompletionLoop() {
  {
    const MutexLock lock(mutex_);
    assert(first_ == nullptr && "an operation outlived its loop");
  }
  queue_.Shutdown();
  thread_.join();
}

void CompletionLoop::Run() {
  NameThread("attend-client");
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
#ifdef ATTEND_THREAD_SANITIZER
    __tsan_acquire(tag);
#endif
    const auto* event = static_cast<const Event*>(tag);
    event->operation->OnEvent(event->slot, ok);
  }
}

bool CompletionLoop::Add(Operation* operation) {
  const MutexLock lock(mutex_);
  if (closed_) return false;
  assert(operation->next_ == nullptr && operation->previous_ == nullptr && operation != first_);
  operation->next_ = first_;
  if (first_ != nullptr) first_->previous_ = operation;
  first_ = operation;
  return true;
}

void CompletionLoop::Remove(Operation* operation) {
  const MutexLock lock(mutex_);
  assert((operation == first_) == (operation->previous_ == nullptr) && "it is not here");
  if (operation->previous_ != nullptr) operation->previous_->next_ = operation->next_;
  if (operation->next_ != nullptr) operation->next_->previous_ = operation->previous_;
  if (first_ == operation) first_ = operation->next_;
  operation->previous_ = operation->next_ = nullptr;
  if (first_ == nullptr) empty_.NotifyAll();
}

void CompletionLoop::Close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  for (Operation* operation = first_; operation != nullptr; operation = operation->next_) {
    operation->Cancel();
  }
  while (first_ != nullptr) empty_.Wait(mutex_);
}

ConnectionPool::ConnectionPool(const std::string& server, std::shared_ptr<const TlsClient> tls,
                               int connections, int completion_threads, const Clock& clock,
                               std::string token, std::string traceparent)
    : clock_(clock),
      tls_(std::move(tls)),
      token_(std::move(token)),
      traceparent_(std::move(traceparent)) {
  if (completion_threads == 0) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    completion_threads = std::clamp(connections, 1, std::max(1, cores / 2));
  }
  completion_threads = std::min(completion_threads, connections);
  for (int i = 0; i < completion_threads; ++i) loops_.push_back(std::make_unique<CompletionLoop>());
  for (int i = 0; i < connections; ++i) {
    connections_.push_back(
        std::make_unique<Connection>(MakeChannel(server, tls_.get(), !token_.empty()),
                                     loops_[static_cast<size_t>(i % completion_threads)].get()));
  }
  control_ = MakeChannel(server, tls_.get(), !token_.empty());
}

int ConnectionPool::Acquire() {
  const int count = size();
  int best = 0;
  if (count > 1) {
    const auto start = turn_.fetch_add(1, std::memory_order_relaxed);
    int64_t fewest = INT64_MAX;
    for (int k = 0; k < count; ++k) {
      const int index = static_cast<int>((start + static_cast<uint64_t>(k)) % count);
      const int64_t outstanding = connections_[index]->outstanding.load(std::memory_order_relaxed);
      if (outstanding < fewest) {
        fewest = outstanding;
        best = index;
      }
      if (fewest == 0) break;
    }
  }
  connections_[best]->outstanding.fetch_add(1, std::memory_order_relaxed);
  return best;
}

Status ConnectionPool::Explain(Status status) const {
  if (status.code() != Code::kUnavailable || tls_ == nullptr) return status;
  const std::string why = tls_->Diagnose(kDiagnosisMax);
  if (why.empty()) return status;
  return Unavailable(why + " (" + status.message() + ")");
}

void ConnectionPool::Close() {
  for (auto& loop : loops_) loop->Close();
}

RequestIds::RequestIds(uint64_t seed) {
  std::snprintf(prefix_, sizeof prefix_, "%08x", static_cast<unsigned>(SplitMix64(&seed)));
}

RequestIds::Id RequestIds::Next() {
  Id id;
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed) % 1'000'000'000'000;
  id.size = std::snprintf(id.text, sizeof id.text, "%s-%llu", prefix_,
                          static_cast<unsigned long long>(number));
  assert(id.size > 0 && id.size <= Id::kSizeMax);
  return id;
}

Status CheckTenant(const std::string& tenant) {
  constexpr size_t kTenantCharactersMax = 256;
  if (tenant.size() > kTenantCharactersMax) {
    return InvalidArgument("tenant has " + std::to_string(tenant.size()) +
                           " characters, must have at most " +
                           std::to_string(kTenantCharactersMax));
  }
  for (const char c : tenant) {
    if (c >= ' ' && c <= '~') continue;
    return InvalidArgument("tenant has the byte " + std::to_string(static_cast<uint8_t>(c)) +
                           ", must be printable ASCII, 32 to 126");
  }
  return Status();
}

Status CheckTraceParent(const std::string& traceparent) {
  constexpr std::string_view kForm = "00-hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh-hhhhhhhhhhhhhhhh-hh";
  bool same = traceparent.size() == kForm.size();
  for (size_t i = 0; same && i < kForm.size(); ++i) {
    const char c = traceparent[i];
    same = kForm[i] == 'h' ? (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') : c == kForm[i];
  }
  if (same || traceparent.empty()) return Status();
  return InvalidArgument("traceparent is \"" + traceparent.substr(0, kForm.size()) +
                         "\", must be 00-TRACE-SPAN-FLAGS with 32, 16 and 2 hexadecimal digits");
}

Status CheckNames(const std::string& tenant, const std::string& traceparent) {
  ATTEND_RETURN_IF_ERROR(CheckTenant(tenant));
  return CheckTraceParent(traceparent);
}

void ConnectionPool::Introduce(const std::string& tenant, const std::string& traceparent,
                               grpc::ClientContext* context) const {
  const std::string& span = traceparent.empty() ? traceparent_ : traceparent;
  if (!span.empty()) context->AddMetadata("traceparent", span);
  if (!tenant.empty()) context->AddMetadata("x-attend-tenant", tenant);
  if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return Status();
  // gRPC's words for a server that speaks something else: HTTP/1 for the most part, or TLS.
  if (status.error_message().find("Failed parsing HTTP/2") != std::string::npos ||
      status.error_message().find("http1.x server") != std::string::npos) {
    return Unavailable(
        "what listens there is not a gRPC server, or takes TLS only; is this the port of its "
        "metrics, or is its authority missing (tls_ca)? (" +
        status.error_message() + ")");
  }
  switch (status.error_code()) {
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DATA_LOSS:  // codes that attend's Status has no name for
      return Status(Code::kUnknown, "gRPC status " + std::to_string(status.error_code()) + ": " +
                                        status.error_message());
    default:
      return Status(static_cast<Code>(status.error_code()), status.error_message());
  }
}

Pushback PushbackOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("grpc-retry-pushback-ms");
  if (found == trailers.end()) return {};
  return ParsePushback(std::string_view(found->second.data(), found->second.size()));
}

std::vector<int64_t> RefusedLengths(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("attend-status-bin");
  v1::RequestStatus status;
  if (found == trailers.end() ||
      !status.ParseFromArray(found->second.data(), static_cast<int>(found->second.size()))) {
    return {};
  }
  return {status.session_lengths().begin(), status.session_lengths().end()};
}

gpr_timespec DeadlineAfter(std::chrono::nanoseconds timeout) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(timeout.count(), GPR_TIMESPAN));
}

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/connections.h"

#include <grpc/grpc.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdio>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "client/call/server_address.h"
#include "client/call/token.h"
#include "client/rpc/op_lock.h"
#include "kernels/util/processors.h"

namespace attend::client {
namespace {

// Bounds of the wait between connection attempts; gRPC waits at least the first.
constexpr int kBackoffMinMs = 100;
constexpr int kBackoffMaxMs = 2000;
// For distant and busy servers. A host that drops packets holds up calls for this long.
constexpr int kConnectMaxMs = 5000;

// Bound on an answer without tensors: far more than a page of sessions with many layers.
constexpr int kSmallAnswerBytesMax = 64 << 20;

// For a second connection that finds out what is wrong.
constexpr std::chrono::milliseconds kDiagnosisMax{2000};

// Minimum time between two lookups of a name, which follow the end of a connection. New servers are
// found this soon after the server has closed an aged connection.
constexpr int kLookupMinMs = 2000;
// Number of pinned servers; beyond it, the one unused for longest is dropped.
constexpr size_t kPinnedMax = 64;
// gRPC's own balancing: round robin over the servers that report SERVING.
constexpr char kSpread[] =
    R"({"loadBalancingConfig":[{"round_robin":{}}],"healthCheckConfig":{"serviceName":""}})";

int Milliseconds(std::chrono::nanoseconds time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return static_cast<int>(std::clamp<int64_t>(ms, 1, INT_MAX));
}

// The address in gRPC's error text if no process listens there; else empty.
std::string AddressWithoutServer(const std::string& words) {
  constexpr std::string_view kBefore = "failed to connect to all addresses; last error: ";
  if (!words.starts_with(kBefore)) return "";
  const size_t begin = words.find(' ', kBefore.size()) + 1;  // after a code's name
  size_t end = words.find(": Failed to connect to remote host: Connection refused", begin);
  if (end == words.npos) end = words.find(": No such file or directory", begin);
  if (begin == 0 || end == words.npos) return "";
  const std::string peer = words.substr(begin, end - begin);
  return IsUnixTarget(peer) ? peer : ServerOfPeer(peer);
}

// A server that is cut off does not close its connections, so only pings detect it.
void AskWhetherItIsThere(const PoolOptions& options, grpc::ChannelArguments* args) {
  args->SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(options.keepalive_time));
  args->SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(options.keepalive_timeout));
  args->SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no bound
}

void SpreadCalls(grpc::ChannelArguments* args) {
  args->SetServiceConfigJSON(kSpread);
  args->SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kLookupMinMs);
  // A proxy ($http_proxy) would look like a single server.
  args->SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
}

int ThreadsOf(const PoolOptions& options) {
  int threads = options.completion_threads;
  if (threads == 0) {
    threads = std::clamp(options.connections, 1, std::max(1, Processors() / 2));
  }
  return std::min(threads, options.connections);
}

}  // namespace

ConnectionPool::ConnectionPool(const PoolOptions& options, const Clock& clock)
    : options_(options),
      clock_(clock),
      several_(MayBeSeveral(options.target)),
      loops_(ThreadsOf(options)) {
  any_ = MakeConnections(options.target, several_);
  control_ = MakeChannel(options.target, Use::kSmallCalls, /*spread=*/false);
  if (several_) control_in_turn_ = MakeChannel(options.target, Use::kSmallCalls, /*spread=*/true);
}

std::shared_ptr<grpc::Channel> ConnectionPool::MakeChannel(const std::string& target, Use use,
                                                           bool spread) const {
  grpc::ChannelArguments args;
  // A proxy ($http_proxy) would see the token.
  if (!token().empty()) args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Channels with equal arguments share a socket unless each has its own subchannel pool.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // gRPC's own retries would buffer every message; retry_policy.h decides about retries.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kBackoffMinMs);
  // Despite its name, gRPC uses it as the connect timeout.
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMaxMs);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kBackoffMaxMs);
  args.SetMaxReceiveMessageSize(use == Use::kSmallCalls ? kSmallAnswerBytesMax : -1);
  args.SetMaxSendMessageSize(-1);
  if (several_) AskWhetherItIsThere(options_, &args);
  if (spread) SpreadCalls(&args);
  const TlsClient* const tls = options_.tls.get();
  if (tls == nullptr || IsUnixTarget(target)) {
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), args);
  }
  // A single address of a name has the name's certificate.
  const bool by_name = !tls->server_name().empty();
  if (by_name || target != options_.target) {
    args.SetSslTargetNameOverride(by_name ? tls->server_name() : tls->host());
  }
  return grpc::CreateCustomChannel(target, tls->Credentials(), args);
}

ConnectionPool::Connections ConnectionPool::MakeConnections(const std::string& target,
                                                            bool spread) const {
  Connections made;
  for (int i = 0; i < size(); ++i) {
    CompletionLoop* const loop = loops_.at(i % loops_.count());
    made.push_back(std::make_shared<Connection>(MakeChannel(target, Use::kCalls, spread), loop, i));
  }
  return made;
}

Lease ConnectionPool::Choose(const Connections& connections, uint64_t turn) {
  size_t best = 0;
  int64_t fewest = INT64_MAX;
  for (size_t k = 0; k < connections.size() && fewest > 0; ++k) {
    const size_t index = (turn + k) % connections.size();
    const int64_t outstanding = connections[index]->outstanding.load(std::memory_order_relaxed);
    if (outstanding < fewest) {
      fewest = outstanding;
      best = index;
    }
  }
  return Lease(connections[best]);
}

Lease ConnectionPool::Acquire(const std::string& server) {
  const uint64_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
  if (server.empty()) return Choose(any_, turn);
  const KeptReleases kept(loop());
  Pinned forgotten;
  const MutexLock lock(mutex_);
  return Choose(PinnedTo(server, &forgotten).connections, turn);
}

std::shared_ptr<grpc::Channel> ConnectionPool::control(const std::string& server) const {
  if (server.empty()) return control_;
  const KeptReleases kept(loop());
  Pinned forgotten;
  const MutexLock lock(mutex_);
  return PinnedTo(server, &forgotten).control;
}

ConnectionPool::Pinned& ConnectionPool::PinnedTo(const std::string& server,
                                                 Pinned* forgotten) const {
  const uint64_t turn = turn_.load(std::memory_order_relaxed);
  const auto found = pinned_.find(server);
  if (found != pinned_.end()) {
    found->second.used = turn;
    return found->second;
  }
  if (pinned_.size() >= kPinnedMax) {
    // Calls in flight keep their connections through their leases.
    const auto oldest = std::min_element(
        pinned_.begin(), pinned_.end(),
        [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
    *forgotten = std::move(oldest->second);
    pinned_.erase(oldest);
  }
  const Result<std::string> target = ServerTarget(server);
  assert(target.ok() && "CheckServer was not asked");
  return pinned_[server] = {MakeConnections(*target, /*spread=*/false),
                            MakeChannel(*target, Use::kSmallCalls, /*spread=*/false), turn};
}

Status ConnectionPool::CheckServer(const std::string& server) const {
  if (server.empty()) return Status();
  const Result<std::string> target = ServerTarget(server);
  if (!target.ok()) return target.status();
  if (IsList(*target)) return InvalidArgument("server is \"" + server + "\", must be one address");
  return options_.tls != nullptr ? Status() : CheckTokenStays(token(), *target);
}

std::string ConnectionPool::ServerOf(const grpc::ClientContext& context) const {
  return several_ ? ServerOfPeer(context.peer()) : std::string();
}

Status ConnectionPool::Explain(Status status) const {
  if (status.code() != Code::kUnavailable || options_.tls == nullptr) return status;
  const std::string why = options_.tls->Diagnose(kDiagnosisMax);
  if (why.empty()) return status;
  return Unavailable(why + " (" + status.message() + ")");
}

bool ConnectionPool::IsHere() const {
  for (int n = 0; n < loops_.count(); ++n) {
    if (loops_.at(n)->IsHere()) return true;
  }
  return false;
}

void ConnectionPool::Close() {
  loops_.control()->Close();  // first: user callbacks, which the other loops wait for, may wait for
                              // control calls
  for (int n = 0; n < loops_.count(); ++n) loops_.at(n)->Close();
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
  const std::string& span = traceparent.empty() ? options_.traceparent : traceparent;
  if (!span.empty()) context->AddMetadata("traceparent", span);
  if (!tenant.empty()) context->AddMetadata("x-attend-tenant", tenant);
  if (!token().empty()) context->AddMetadata("authorization", "Bearer " + token());
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return Status();
  // gRPC's error text for a server that speaks something else, mostly HTTP/1 or TLS.
  if (status.error_message().find("Failed parsing HTTP/2") != std::string::npos ||
      status.error_message().find("http1.x server") != std::string::npos) {
    return Unavailable(
        "what listens there is not a gRPC server, or takes TLS only; is this the port of its "
        "metrics, or is its authority missing (tls_ca)? (" +
        status.error_message() + ")");
  }
  if (const std::string at = AddressWithoutServer(status.error_message()); !at.empty()) {
    return Unavailable("no server at " + at + ": is attend-server running? (" +
                       status.error_message() + ")");
  }
  switch (status.error_code()) {
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::DATA_LOSS:  // not in attend's Code
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

std::string ServerIdOf(const grpc::ClientContext& context) {
  const auto& metadata = context.GetServerInitialMetadata();
  const auto found = metadata.find("attend-server-id");
  if (found == metadata.end()) return "";
  return std::string(found->second.data(), found->second.size());
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

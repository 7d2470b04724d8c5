// SPDX-License-Identifier: Apache-2.0

#include "server/app/grpc_server.h"

#include <grp.h>
#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "attend/v1/attention.grpc.pb.h"
#include "attend/v1/session.grpc.pb.h"
#include "inference/grpc_service.grpc.pb.h"
#include "server/app/options.h"
#include "server/app/unix_address.h"
#include "server/net/guarded_functions.h"
#include "server/net/tcp_listener.h"
#include "server/util/cgroups.h"
#include "server/util/parse_number.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Less than the second that clients may choose, as neither side's clock is exact.
constexpr double kClientPingSecondsMin = 0.5;

milliseconds Milliseconds(double seconds) {
  return milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
}

void SetConnectionOptions(const Config& config, grpc::ServerBuilder& builder) {
  const auto set = [&builder](const char* name, double seconds) {
    builder.AddChannelArgument(name, static_cast<int>(Milliseconds(seconds).count()));
  };
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(MaxStreams(config)));
  set(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, config.handshake_timeout_seconds);
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, config.connection_idle_timeout_seconds);
  // Grace has no end, so that no call and no stream is cut off.
  if (config.max_connection_age_seconds > 0) {
    set(GRPC_ARG_MAX_CONNECTION_AGE_MS, config.max_connection_age_seconds);
  }
  // Clients of several servers ask whether each is still there (client/README.md). Without this
  // they might do so every five minutes only.
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kClientPingSecondsMin);
  // TCP finds out whether clients are still there, see tcp_listener.h.
}

void SetOptions(const Config& config, grpc::ServerBuilder& builder) {
  // Services limit the size of messages themselves, count those that they refuse and say why. gRPC
  // would check no earlier, once all of a message has arrived, and would tell only the client.
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  SetConnectionOptions(config, builder);
  // gRPC limits a message's size only after decompression. Compressing tensors does not pay anyway.
  builder.SetDefaultCompressionAlgorithm(GRPC_COMPRESS_NONE);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  if (config.grpc_memory_max_bytes > 0) {
    grpc::ResourceQuota quota("attend");
    quota.Resize(static_cast<size_t>(config.grpc_memory_max_bytes));
    builder.SetResourceQuota(quota);
  }
}

// A group's id, from its name or its number.
std::optional<gid_t> FindGroup(const std::string& group) {
  if (const struct group* const found = getgrnam(group.c_str())) return found->gr_gid;
  return ParseNumber<gid_t>(group);
}

// The most that the shared memory's socket may have. Of callers that have said who they are there
// may be as many again.
int64_t RegionConnections(const Config& config) {
  if (!config.shared_memory) return 0;
  const int connections_max = MakeSharedMemoryOptions(config).socket.connections_max;
  return connections_max * (config.tokens.empty() ? 1 : 2);
}

}  // namespace

std::vector<std::string> ServiceNames(const Config& config) {
  std::vector<std::string> names = {v1::AttentionService::service_full_name(),
                                    v1::SessionService::service_full_name()};
  if (config.oip) names.push_back(inference::GRPCInferenceService::service_full_name());
  return names;
}

Result<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const Config& config, grpc::Service& methods, grpc::CallbackGenericService& unknown,
    CallMethods* own, BlockPool* own_blocks, std::shared_ptr<CallerGate> gate,
    ConnectionHolds& connections, Metrics& metrics, Logger& logger, const Clock& clock,
    std::function<void()> changed) {
  // Holds the library for the life of the process: its shutdown can wait 10 s for a poller.
  [[maybe_unused]] static const bool held = (grpc_init(), true);
  ATTEND_RETURN_IF_ERROR(CheckFunctions(kGuardedFunctions));
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  const Result<ConnectionLimits> limits =
      LimitConnections({config.max_connections, config.max_connections_per_peer}, DescriptorsMax(),
                       RegionConnections(config));
  if (!limits.ok()) return limits.status();
  server->limits_ = *limits;
  Result<std::unique_ptr<Intake>> intake =
      Intake::Make(config, std::move(gate), connections, metrics, logger, clock);
  if (!intake.ok()) return intake.status();
  server->intake_ = std::move(*intake);
  ATTEND_RETURN_IF_ERROR(server->Listen(config));
  grpc::ServerBuilder builder;
  SetOptions(config, builder);
  ATTEND_RETURN_IF_ERROR(server->intake_->AddTo(builder));
  builder.RegisterService(&methods);
  builder.RegisterCallbackGenericService(&unknown);
  server->grpc_ = builder.BuildAndStart();
  if (server->grpc_ == nullptr) return Internal("gRPC cannot start a server");
  if (own != nullptr) ATTEND_RETURN_IF_ERROR(server->StartOwn(config, *own, own_blocks, clock));

  std::vector<int> sockets;
  for (const UniqueFd& socket : server->sockets_) sockets.push_back(socket.get());
  const Listener::Callbacks callbacks{
      [taker = server->intake_.get()](int socket) { return taker->Admits(socket); },
      [taker = server->intake_.get()](int socket) { return taker->Take(socket); },
      [taker = server->intake_.get()](int socket, ino_t inode, ClientRefusal reason) {
        taker->End(socket, inode, reason);
      },
      [changed = std::move(changed)](bool) { changed(); }};
  const Listener::Options options{*limits, Milliseconds(config.handshake_timeout_seconds),
                                  Milliseconds(config.first_call_timeout_seconds),
                                  Milliseconds(config.message_timeout_seconds),
                                  server->intake_->message_memory()};
  Result<std::unique_ptr<Listener>> listener =
      Listener::Start(options, std::move(sockets), callbacks, metrics, logger, clock);
  if (!listener.ok()) return listener.status();
  server->listener_ = std::move(*listener);
  server->heartbeat_ = std::make_unique<Heartbeat>(server->grpc_->InProcessChannel({}), clock);
  return server;
}

Status GrpcServer::StartOwn(const Config& config, CallMethods& methods, BlockPool* blocks,
                            const Clock& clock) {
  Http2Transport::Options options;
  options.blocks = blocks;
  options.loops = ProcessorsByQuota();
  ConnectionOptions& connection = options.connection;
  connection.session.streams_max = static_cast<uint32_t>(MaxStreams(config));
  connection.handshake_timeout = Milliseconds(config.handshake_timeout_seconds);
  connection.idle_timeout = Milliseconds(config.connection_idle_timeout_seconds);
  if (config.max_connection_age_seconds > 0) {
    connection.age_max = Milliseconds(config.max_connection_age_seconds);
  }
  // Calls that were reset are still the server's until their requests have ended.
  connection.calls_max = 2 * MaxStreams(config);
  Result<std::unique_ptr<Http2Transport>> transport =
      Http2Transport::Start(options, methods, clock);
  if (!transport.ok()) return transport.status();
  transport_ = std::move(*transport);
  return intake_->ServeBy(*transport_, connection.session.stream_window_bytes,
                          connection.handshake_timeout);
}

int GrpcServer::unanswered_seconds() const {
  const int grpc = heartbeat_->unanswered_seconds();
  if (transport_ == nullptr) return grpc;
  const auto own = std::chrono::duration_cast<seconds>(transport_->StoodStill());
  return std::max(grpc, static_cast<int>(own.count()));
}

Status GrpcServer::Listen(const Config& config) {
  for (const std::string& address : config.listen) {
    if (address.starts_with("unix:")) {
      ATTEND_RETURN_IF_ERROR(ListenUnix(config, address));
      continue;
    }
    Result<TcpListeners> tcp = ListenTcp(
        address,
        {seconds(config.keepalive_time_seconds), seconds(config.keepalive_timeout_seconds)},
        TcpOfLoopbackOnly(config) ? TcpReach::kThisMachine : TcpReach::kAnyone);
    if (!tcp.ok()) {
      return Unavailable("listen " + address + " cannot be bound: " + tcp.status().message());
    }
    addresses_.push_back(WithPort(address, tcp->port));
    for (UniqueFd& socket : tcp->sockets) sockets_.push_back(std::move(socket));
  }
  return Status();
}

Status GrpcServer::ListenUnix(const Config& config, const std::string& address) {
  const Result<UnixAddress> parsed = UnixAddressOf(address, config);
  if (!parsed.ok()) return parsed.status();
  UnixListenOptions options;
  options.path = parsed->path;
  options.name = "listen " + address + " cannot be bound";
  if (!parsed->group.empty()) {
    const std::optional<gid_t> group = FindGroup(parsed->group);
    if (!group) return InvalidArgument("socket-group " + parsed->group + ": no such group");
    options.group = *group;
    options.mode = 0660;
  }
  if (!parsed->mode.empty()) {
    options.mode = static_cast<mode_t>(std::stoi(parsed->mode, nullptr, 8));
  }
  Result<UnixListener> listener = ListenAt(options);
  if (!listener.ok()) return listener.status();
  unix_.push_back(std::move(*listener));
  sockets_.push_back(std::move(unix_.back().socket));
  addresses_.push_back("unix:" + parsed->path);
  return Status();
}

GrpcServer::~GrpcServer() {
  heartbeat_.reset();
  listener_.reset();
  RemoveSockets();
  if (intake_ != nullptr) intake_->StopServing();
  transport_.reset();
  if (grpc_ == nullptr) return;
  grpc_->Shutdown(std::chrono::system_clock::now());
  grpc_->Wait();
}

void GrpcServer::RemoveSockets() {
  for (UnixListener& listener : unix_) StopListening(&listener);
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/app/grpc_server.h"

#include <grp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>

#include "attend/v1/attention.pb.h"
#include "attend/v1/session.pb.h"
#include "inference/grpc_service.pb.h"
#include "server/app/options.h"
#include "server/app/unix_address.h"
#include "server/net/tcp_listener.h"
#include "server/util/assign.h"
#include "server/util/cgroups.h"
#include "server/util/parse_number.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

milliseconds Milliseconds(double seconds) {
  return milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
}

// A group's id, from its name or its number.
std::optional<gid_t> FindGroup(const std::string& group) {
  if (const struct group* const found = getgrnam(group.c_str())) return found->gr_gid;
  return ParseNumber<gid_t>(group);
}

// Maximum connections of the shared-memory socket. With --tokens, as many again for authenticated
// clients.
int64_t RegionConnections(const Config& config) {
  if (!config.shared_memory) return 0;
  const int connections_max = MakeSharedMemoryOptions(config).socket.connections_max;
  return connections_max * (config.tokens.empty() ? 1 : 2);
}

}  // namespace

std::vector<std::string> ServiceNames(const Config& config) {
  std::vector<std::string> names = {"attend.v1.AttentionService", "attend.v1.SessionService"};
  if (config.oip) names.emplace_back("inference.GRPCInferenceService");
  return names;
}

Result<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const Config& config, CallMethods& methods, BlockPool& blocks, ConnectionHolds& connections,
    Metrics& metrics, Logger& logger, const Clock& clock, std::function<void()> changed) {
  std::unique_ptr<GrpcServer> server(new GrpcServer());
  const Result<ConnectionLimits> limits =
      LimitConnections({config.max_connections, config.max_connections_per_peer}, DescriptorsMax(),
                       RegionConnections(config));
  if (!limits.ok()) return limits.status();
  server->limits_ = *limits;
  ATTEND_RETURN_IF_ERROR(
      Assign(server->intake_, Intake::Make(config, connections, metrics, logger, clock)));
  ATTEND_RETURN_IF_ERROR(server->Listen(config));
  ATTEND_RETURN_IF_ERROR(server->Serve(config, methods, blocks, metrics, logger, clock));

  std::vector<int> sockets;
  for (const UniqueFd& socket : server->sockets_) sockets.push_back(socket.get());
  const Listener::Callbacks callbacks{
      [taker = server->intake_.get()](int socket) { return taker->Admits(socket); },
      [taker = server->intake_.get()](int socket) { return taker->Take(socket); },
      [taker = server->intake_.get()](const ConnectionUse& use, ConnectionRefusal reason) {
        taker->End(use, reason);
      },
      [changed = std::move(changed)](bool) { changed(); }};
  const bool strangers = !config.tokens.empty();  // others are ended by the transport
  const Listener::Options options{
      *limits, strangers ? Milliseconds(config.first_call_timeout_seconds) : std::chrono::hours(24),
      server->intake_->message_memory()};
  ATTEND_RETURN_IF_ERROR(Assign(
      server->listener_, Listener::Start(options, sockets, callbacks, metrics, logger, clock)));
  return server;
}

Status GrpcServer::Serve(const Config& config, CallMethods& methods, BlockPool& blocks,
                         Metrics& metrics, Logger& logger, const Clock& clock) {
  Http2Transport::Options options;
  options.blocks = &blocks;
  options.loops = ProcessorsByQuota();
  ConnectionOptions& connection = options.connection;
  connection.session.streams_max = static_cast<uint32_t>(MaxStreams(config));
  connection.handshake_timeout = Milliseconds(config.handshake_timeout_seconds);
  connection.idle_timeout = Milliseconds(config.connection_idle_timeout_seconds);
  if (config.max_connection_age_seconds > 0) {
    connection.age_max = Milliseconds(config.max_connection_age_seconds);
  }
  // Calls that were reset count until their requests have ended.
  connection.calls_max = 2 * MaxStreams(config);
  connection.message_timeout = Milliseconds(config.message_timeout_seconds);
  connection.write_timeout = WriteTimeout(config);
  connection.on_unread = [&metrics, &logger,
                          seconds = config.write_timeout_seconds](const std::string& peer) {
    metrics.RecordUnread();
    logger.Log(LogLevel::warn, "call ended because the client did not read its answer",
               {{"write_timeout_s", seconds}, {"peer", peer}});
  };
  ATTEND_RETURN_IF_ERROR(Assign(transport_, Http2Transport::Start(options, methods, clock)));
  return intake_->ServeBy(*transport_, connection.handshake_timeout);
}

int GrpcServer::unanswered_seconds() const {
  return static_cast<int>(std::chrono::duration_cast<seconds>(transport_->StoodStill()).count());
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
  listener_.reset();
  RemoveSockets();
  if (intake_ != nullptr) intake_->StopServing();
}

void GrpcServer::RemoveSockets() {
  for (UnixListener& listener : unix_) StopListening(&listener);
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Admission and end of the region socket's connections: peer credentials, identification, limits on
// connections, and revocation.
//
// Two counts bound the connections: unidentified ones, by user and in total, and identified ones,
// by tenant (places_). At the bound an unidentified connection is dropped in favour of a newer one,
// oldest first; an identified one never is.

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/util/counted.h"
#include "server/auth/caller.h"
#include "server/regions/region_socket.h"

namespace attend {
namespace {

// How long to stop accepting after running out of descriptors.
constexpr int kAcceptRestMs = 100;

}  // namespace

void RegionSocket::End(Connections::iterator connection) {
  logger_.Log(LogLevel::debug, "shared memory client disconnected",
              {{"client", connection->second.client}});
  registry_.RemoveClient(connection->second.client);
  if (options_.identify && connection->second.client != 0) {
    places_.Add(connection->second.tenant, -1);
  }
  std::erase(waiting_, connection->first);
  connections_.erase(connection);
}

void RegionSocket::Finish(Connections::iterator connection) {
  const uint64_t client = connection->second.client;
  const bool has_regions = registry_.EndClient(client);
  if (registry_.Lends(client)) return;
  if (!has_regions) return End(connection);
  shutdown(connection->first, SHUT_WR);
}

void RegionSocket::FinishEnded() {
  for (auto each = connections_.begin(); each != connections_.end();) {
    const auto connection = each++;
    if (connection->second.ended) Finish(connection);
  }
}

bool RegionSocket::EndUnknown(std::optional<uid_t> user) {
  auto oldest = connections_.end();
  for (auto each = connections_.begin(); each != connections_.end(); ++each) {
    const Connection& connection = each->second;
    if (!options_.identify || connection.client != 0) continue;
    if (user && connection.user != *user) continue;
    if (oldest == connections_.end() || connection.since < oldest->second.since) oldest = each;
  }
  if (oldest == connections_.end()) return false;
  End(oldest);
  return true;
}

void RegionSocket::RecheckAll() { eventfd_write(done_->wake.get(), 1); }

void RegionSocket::EndRevoked() {
  if (!options_.generation) return;
  const uint64_t generation = options_.generation();
  if (std::exchange(generation_, generation) == generation) return;
  for (auto each = connections_.begin(); each != connections_.end();) {
    const auto connection = each++;
    if (const Status known = Recheck(connection->second); !known.ok()) EndWith(connection, known);
  }
}

TimePoint RegionSocket::EndLate() {
  const TimePoint now = clock_.Now();
  TimePoint next = kNever;
  for (auto each = connections_.begin(); each != connections_.end();) {
    const auto connection = each++;
    if (!options_.identify || connection->second.client != 0) continue;
    const TimePoint end = connection->second.since + options_.identify_time;
    if (end > now) {
      next = std::min(next, end);
      continue;
    }
    if (options_.on_nobody) options_.on_nobody();
    EndWith(connection,
            Status(kUnauthenticated, "no token: the connection did not identify itself in time"));
  }
  return next;
}

int RegionSocket::PollTime(TimePoint until) const {
  const int rest_ms = accepting_ ? -1 : kAcceptRestMs;
  if (until == kNever) return rest_ms;
  // At most an hour at a time; later events are checked again.
  const Duration left = std::clamp<Duration>(until - clock_.Now(), {}, std::chrono::hours(1));
  const int wait_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
  return accepting_ ? wait_ms : std::min(wait_ms, rest_ms);
}

Result<uid_t> RegionSocket::CheckPeer(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return Status(Code::kPermissionDenied, "the client's user cannot be determined");
  }
  if (!options_.any_user && peer.uid != geteuid()) {
    return Status(Code::kPermissionDenied, "the client runs as user " + std::to_string(peer.uid) +
                                               ", must run as the server's user, " +
                                               std::to_string(geteuid()));
  }
  // Identified connections are bounded separately (CheckPlace).
  int all = 0;
  int of_user = 0;
  for (const auto& [fd, connection] : connections_) {
    if (options_.identify && connection.client != 0) continue;
    ++all;
    of_user += connection.user == peer.uid ? 1 : 0;
  }
  if (options_.any_user && of_user >= std::max(1, options_.connections_max / 4) &&
      !EndUnknown(peer.uid)) {
    return ResourceExhausted("user " + std::to_string(peer.uid) + " has " +
                             Counted(of_user, "connection") + ", the limit for one user");
  }
  if (all >= options_.connections_max && !EndUnknown(std::nullopt)) {
    return ResourceExhausted("the socket has " + Counted(all, "connection") + ", the limit");
  }
  return peer.uid;
}

Status RegionSocket::TakePlace(int tenant, CountHold& place) {
  if (options_.limits == nullptr) return Status();
  return options_.limits->Take(std::max(0, tenant), Limit::kConnections, place);
}

Status RegionSocket::CheckPlace(int tenant) const {
  if (places_.Room(tenant) > 0) return Status();
  return ResourceExhausted("the socket has reached its limit of " +
                           std::to_string(options_.connections_max) +
                           " connections; the tenant has " + std::to_string(places_.held(tenant)) +
                           ", its reserved share is " + std::to_string(places_.own(tenant)));
}

// Without authentication, a token is accepted but not checked.
v1::RegionReply RegionSocket::Identify(Connection& connection, const v1::Identify& request) {
  v1::RegionReply reply;
  reply.mutable_identified();
  if (!options_.identify) return reply;
  if (connection.client != 0) {
    return Refuse(connection.client, Status(Code::kFailedPrecondition,
                                            "the connection has already identified itself"));
  }
  const uint64_t generation = options_.generation ? options_.generation() : 0;
  const Result<int> tenant = options_.identify(request.token(), request.tenant());
  if (!tenant.ok()) return Refuse(0, tenant.status());
  CountHold place;
  Status status = TakePlace(*tenant, place);
  if (status.ok()) status = CheckPlace(*tenant);
  if (!status.ok()) return Refuse(0, status);
  places_.Add(*tenant, 1);
  connection.client = registry_.AddClient(*tenant);
  connection.said = request;
  connection.tenant = *tenant;
  connection.generation = generation;
  connection.place = std::move(place);
  logger_.Log(LogLevel::debug, "shared memory client identified", {{"client", connection.client}});
  return reply;
}

Status RegionSocket::Recheck(Connection& connection) const {
  if (connection.client == 0 || connection.ended || !options_.generation) return Status();
  const uint64_t generation = options_.generation();
  if (connection.generation == generation) return Status();
  const v1::Identify& said = connection.said;
  const Result<int> tenant = options_.identify(said.token(), said.tenant());
  if (!tenant.ok()) return tenant.status();
  if (*tenant != connection.tenant) {
    return Status(Code::kPermissionDenied, "the caller now belongs to another tenant: reconnect");
  }
  connection.generation = generation;
  return Status();
}

}  // namespace attend

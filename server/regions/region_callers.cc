// SPDX-License-Identifier: Apache-2.0
//
// Who may be connected to the regions' socket: what the system says of a peer, what it says itself,
// and who goes where there is no place for all.

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
#include "server/util/weight_share.h"

namespace attend {
namespace {

// How long not to accept after the process ran out of descriptors.
constexpr int kAcceptRestMs = 100;

}  // namespace

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
            Status(kUnauthenticated, "no token: the connection has not said who it is in time"));
  }
  return next;
}

int RegionSocket::PollTime(TimePoint until) const {
  const int rest_ms = accepting_ ? -1 : kAcceptRestMs;
  if (until == kNever) return rest_ms;
  // An hour at most: what comes later is looked at again.
  const Duration left = std::clamp<Duration>(until - clock_.Now(), {}, std::chrono::hours(1));
  const int wait_ms = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
  return accepting_ ? wait_ms : std::min(wait_ms, rest_ms);
}

Result<uid_t> RegionSocket::CheckPeer(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    return Status(Code::kPermissionDenied, "the user of the process is unknown");
  }
  if (!options_.any_user && peer.uid != geteuid()) {
    return Status(Code::kPermissionDenied, "the process runs as user " + std::to_string(peer.uid) +
                                               ", must run as the server's, " +
                                               std::to_string(geteuid()));
  }
  // Those that have said who they are have places of their own (MakePlace).
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
                             Counted(of_user, "connection") + ", the most of one user");
  }
  if (all >= options_.connections_max && !EndUnknown(std::nullopt)) {
    return ResourceExhausted("the socket has " + Counted(all, "connection") +
                             ", the most it takes");
  }
  return peer.uid;
}

Status RegionSocket::TakePlace(int tenant, CountHold& place) {
  if (options_.limits == nullptr) return Status();
  return options_.limits->Take(std::max(0, tenant), Limit::kConnections, place);
}

int64_t RegionSocket::PlacesOf(int tenant) const {
  return std::max<int64_t>(1, ShareOf(options_.tenant_weights, tenant, options_.connections_max));
}

RegionSocket::Connections::iterator RegionSocket::FindBeyondShare(
    const std::vector<int64_t>& counts) {
  auto first = connections_.end();
  std::pair<bool, RegionRegistry::ClientUse> first_use;
  for (auto each = connections_.begin(); each != connections_.end(); ++each) {
    const Connection& connection = each->second;
    if (connection.client == 0 || connection.displaced) continue;
    if (counts[connection.tenant] <= PlacesOf(connection.tenant)) continue;
    const std::pair use(!connection.ended, registry_.UseOf(connection.client));
    if (first != connections_.end() && use >= first_use) continue;
    first = each;
    first_use = use;
  }
  return first;
}

Status RegionSocket::MakePlace(int tenant) {
  std::vector<int64_t> counts(options_.tenant_weights.size());
  int64_t known = 0;
  int64_t displaced = 0;
  for (const auto& [fd, connection] : connections_) {
    if (connection.client == 0) continue;
    ++(connection.displaced ? displaced : known);
    if (!connection.displaced) ++counts[connection.tenant];
  }
  const bool within = counts[tenant] < PlacesOf(tenant);
  if (known + (within ? 0 : displaced) < options_.connections_max) return Status();
  const auto first = within ? FindBeyondShare(counts) : connections_.end();
  if (first == connections_.end()) {
    return ResourceExhausted("the socket has as many connections as it takes, " +
                             std::to_string(options_.connections_max) + "; the tenant has " +
                             std::to_string(counts[tenant]) + ", its share is " +
                             std::to_string(PlacesOf(tenant)));
  }
  const int beyond = first->second.tenant;
  first->second.displaced = true;
  first->second.place.Release();
  if (first->second.ended) return Status();
  EndWith(first, ResourceExhausted("the connection makes room: its tenant has " +
                                   std::to_string(counts[beyond]) + ", more than its share, " +
                                   std::to_string(PlacesOf(beyond))));
  return Status();
}

// Where nobody asks who calls, a token is taken and not looked at.
v1::RegionReply RegionSocket::Identify(Connection& connection, const v1::Identify& request) {
  v1::RegionReply reply;
  reply.mutable_identified();
  if (!options_.identify) return reply;
  if (connection.client != 0) {
    return Refuse(connection.client,
                  Status(Code::kFailedPrecondition, "the connection has said who it is"));
  }
  const uint64_t generation = options_.generation ? options_.generation() : 0;
  const Result<int> tenant = options_.identify(request.token(), request.tenant());
  if (!tenant.ok()) return Refuse(0, tenant.status());
  CountHold place;
  Status status = TakePlace(*tenant, place);
  if (status.ok()) status = MakePlace(*tenant);
  if (!status.ok()) return Refuse(0, status);
  connection.client = registry_.AddClient(*tenant);
  connection.said = request;
  connection.tenant = *tenant;
  connection.generation = generation;
  connection.place = std::move(place);
  logger_.Log(LogLevel::debug, "shared memory client known", {{"client", connection.client}});
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
    return Status(Code::kPermissionDenied, "the caller is of another tenant now: connect again");
  }
  connection.generation = generation;
  return Status();
}

}  // namespace attend

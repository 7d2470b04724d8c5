// SPDX-License-Identifier: Apache-2.0
//
// Unix sockets in --listen: their tenants, and who may connect to them.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/app/config.h"

namespace attend {

struct UnixAddress {
  std::string path;
  std::string tenant;  // empty: not bound to a tenant
  // Users who may connect to a tenant's socket. Empty: those of --socket-users.
  std::vector<std::string> users = {};
  // Both empty: as in --socket-mode and --socket-group.
  std::string mode = {};
  std::string group = {};
};

// Parses "unix:PATH" or "unix:PATH?tenant=NAME", optionally followed by "&users=A:B", "&mode=MODE"
// and "&group=GROUP". INVALID_ARGUMENT names the fault.
Result<UnixAddress> ParseUnixAddress(const std::string& address);

// The same, with the settings as defaults for what the address leaves out.
Result<UnixAddress> UnixAddressOf(const std::string& address, const Config& config);

// INVALID_ARGUMENT: sockets of several tenants would admit the same users.
Status CheckTenantsSockets(const Config& config);

// The peer name of a Unix socket's calls, without the colon and connection number that follow
// (call_peer.h).
std::string PeerOfPath(const std::string& path);

// Peer name to tenant, for the sockets that are bound to one. Calls with other peer names came
// another way.
std::map<std::string, std::string, std::less<>> TenantsOfPeers(const Config& config);

}  // namespace attend

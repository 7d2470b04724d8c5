// SPDX-License-Identifier: Apache-2.0
//
// Unix sockets among the addresses of --listen, the tenants to which they are bound, and who may
// connect to them.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/util/status.h"
#include "server/app/config.h"

namespace attend {

struct UnixAddress {
  std::string path;
  std::string tenant;  // empty: the socket is bound to none
  // Of a tenant's socket. Empty: as --socket-users says.
  std::vector<std::string> users = {};
  // Both empty: as --socket-mode and --socket-group say.
  std::string mode = {};
  std::string group = {};
};

// Parses "unix:PATH" or "unix:PATH?tenant=NAME", which "&users=A:B", "&mode=MODE" and
// "&group=GROUP" may follow. INVALID_ARGUMENT says what is wrong.
Result<UnixAddress> ParseUnixAddress(const std::string& address);

// The same with the settings where the address itself says nothing.
Result<UnixAddress> UnixAddressOf(const std::string& address, const Config& config);

// INVALID_ARGUMENT: sockets of several tenants would let in the same users.
Status CheckTenantsSockets(const Config& config);

// The Unix socket at `path` as the peers of its calls begin; after it, they have a colon and the
// number of the connection (call_peer.h).
std::string PeerOfPath(const std::string& path);

// The tenants of such sockets, of those that are bound to one. A call whose peer is none of them
// came some other way.
std::map<std::string, std::string, std::less<>> TenantsOfPeers(const Config& config);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Unix sockets among the addresses of --listen, and the tenants to which they are bound.

#pragma once

#include <map>
#include <string>

#include "kernels/util/status.h"
#include "server/app/config.h"

namespace attend {

struct UnixAddress {
  std::string path;
  std::string tenant;  // empty: the socket is bound to none
};

// Parses "unix:PATH" or "unix:PATH?tenant=NAME". INVALID_ARGUMENT says what is wrong.
Result<UnixAddress> ParseUnixAddress(const std::string& address);

// The Unix socket at `path` as the peers of its calls begin; after it, they have a colon and the
// number of the connection (guarded_recvmsg.cc).
std::string PeerOfPath(const std::string& path);

// The tenants of such sockets, of those that are bound to one. A call whose peer is none of them
// came some other way.
std::map<std::string, std::string, std::less<>> TenantsOfPeers(const Config& config);

}  // namespace attend

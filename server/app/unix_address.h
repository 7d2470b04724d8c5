// SPDX-License-Identifier: Apache-2.0
//
// Unix sockets in --listen: their tenants, and who may connect to them.

#pragma once

#include <sys/types.h>

#include <optional>
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

// A user's id, from its name or its number.
std::optional<uid_t> FindUser(const std::string& user);
// INVALID_ARGUMENT: a socket's tenant is unknown, or sockets of several tenants would admit the
// same users.
Status CheckTenantsSockets(const Config& config);

}  // namespace attend

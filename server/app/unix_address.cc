// SPDX-License-Identifier: Apache-2.0

#include "server/app/unix_address.h"

#include <pwd.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

#include "server/app/config_values.h"
#include "server/util/parse_number.h"

namespace attend {
namespace {

constexpr std::string_view kPrefix = "unix:";

std::vector<std::string> SplitAt(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// "tenant=NAME", then the socket's own settings.
Status ParseQuery(const std::string& query, UnixAddress* parsed) {
  const Status wrong = InvalidArgument(
      "the path may be followed only by ?tenant=NAME, and then by &users=A:B, &mode=MODE and "
      "&group=GROUP, each once");
  std::string users;
  const std::array<std::pair<std::string_view, std::string*>, 4> fields = {
      {{"tenant", &parsed->tenant},
       {"users", &users},
       {"mode", &parsed->mode},
       {"group", &parsed->group}}};
  for (const std::string& part : SplitAt(query, '&')) {
    const size_t equals = std::min(part.find('='), part.size());
    const auto* const field = std::find_if(fields.begin(), fields.end(), [&](const auto& each) {
      return each.first == std::string_view(part).substr(0, equals);
    });
    if (field == fields.end() || !field->second->empty() || equals + 1 >= part.size()) return wrong;
    if (parsed->tenant.empty() && field->second != &parsed->tenant) return wrong;
    *field->second = part.substr(equals + 1);
  }
  if (parsed->tenant.empty() || query.ends_with('&')) return wrong;
  parsed->users = SplitAt(users, ':');
  for (const std::string& user : parsed->users) {
    if (user.empty()) return wrong;
  }
  const std::string mode = parsed->mode.empty() ? "" : CheckSocketMode(parsed->mode);
  return mode.empty() ? Status() : InvalidArgument("mode " + mode);
}

bool OthersMayOpen(const UnixAddress& address) {
  if (address.mode.empty()) return !address.group.empty();
  return (std::stoi(address.mode, nullptr, 8) & 077) != 0;
}

}  // namespace

Result<UnixAddress> ParseUnixAddress(const std::string& address) {
  if (!address.starts_with(kPrefix)) return InvalidArgument("it must begin with unix:");
  const std::string rest = address.substr(kPrefix.size());
  const size_t query = rest.find('?');
  UnixAddress parsed{rest.substr(0, query), ""};
  if (parsed.path.empty()) return InvalidArgument("it has no path");
  if (query != std::string::npos) {
    ATTEND_RETURN_IF_ERROR(ParseQuery(rest.substr(query + 1), &parsed));
  }
  return parsed;
}

Result<UnixAddress> UnixAddressOf(const std::string& address, const Config& config) {
  Result<UnixAddress> parsed = ParseUnixAddress(address);
  if (!parsed.ok()) return parsed;
  if (parsed->group.empty() && parsed->mode.empty()) {
    parsed->group = config.socket_group;
    parsed->mode = config.socket_mode;
  }
  if (parsed->users.empty()) parsed->users = config.socket_users;
  return parsed;
}

std::optional<uid_t> FindUser(const std::string& user) {
  if (const struct passwd* const found = getpwnam(user.c_str())) return found->pw_uid;
  return ParseNumber<uid_t>(user);
}

Status CheckTenantsSockets(const Config& config) {
  std::set<std::string> tenants;
  for (const std::string& each : config.listen) {
    const Result<UnixAddress> parsed = ParseUnixAddress(each);
    if (!parsed.ok() || parsed->tenant.empty()) continue;
    const std::string& tenant = *tenants.insert(parsed->tenant).first;
    if (config.tenants.list()[static_cast<size_t>(config.tenants.Find(tenant))].name != tenant) {
      return InvalidArgument(each + ": --tenant does not name " + tenant);
    }
  }
  if (tenants.size() < 2) return Status();
  for (const std::string& each : config.listen) {
    const Result<UnixAddress> own = ParseUnixAddress(each);
    if (!own.ok() || own->tenant.empty() || !own->users.empty()) continue;
    const Result<UnixAddress> used = UnixAddressOf(each, config);
    const bool own_file = !own->mode.empty() || !own->group.empty();
    if (config.socket_users.empty() && (own_file || !OthersMayOpen(*used))) continue;
    return InvalidArgument(
        each +
        ": with sockets of several tenants, --socket-users, --socket-mode and --socket-group would "
        "admit the same users to each; add &users=A:B to this address");
  }
  return Status();
}

}  // namespace attend

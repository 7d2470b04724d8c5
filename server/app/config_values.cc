// SPDX-License-Identifier: Apache-2.0

#include "server/app/config_values.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string_view>

#include "server/app/unix_address.h"
#include "server/schedule/tenants.h"
#include "server/util/parse_number.h"

namespace attend {
namespace {

bool ValidAddress(const std::string& address) {
  if (address.starts_with("unix:")) return ParseUnixAddress(address).ok();
  const size_t colon = address.rfind(':');
  if (colon == 0 || colon == std::string::npos) return false;
  return ParseNumber<uint16_t>(address.substr(colon + 1)).has_value();
}

bool ValidDevice(const std::string& name) {
  if (name == "auto" || name == "cpu" || name == "cuda:all") return true;
  if (!name.starts_with("cuda:") || name.size() > 9) return false;
  return name.size() > 5 &&
         std::all_of(name.begin() + 5, name.end(), [](unsigned char c) { return std::isdigit(c); });
}

}  // namespace

std::vector<std::string> Split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  if (parts.empty()) parts.emplace_back();
  return parts;
}

std::string CheckAddress(std::string& address) {
  if (ValidAddress(address)) return {};
  return "\"" + address +
         "\" must be HOST:PORT with a port in [0, 65535], unix:PATH or "
         "unix:PATH?tenant=NAME&users=A:B&mode=MODE&group=GROUP";
}

std::string CheckCollector(std::string& endpoint) {
  if (endpoint.empty()) return {};
  std::string address = endpoint;
  const bool tls = endpoint.starts_with("https://");
  if (tls || endpoint.starts_with("http://")) address.erase(0, endpoint.find("//") + 2);
  const bool local = address.starts_with("unix:");
  // Forms that are valid in a listen address, but not for a collector.
  const bool more = local ? address != endpoint || address.find('?') != std::string::npos
                          : address.find('/') != std::string::npos || address.ends_with(":0");
  if (more || !ValidAddress(address)) {
    return "\"" + endpoint +
           "\" must be HOST:PORT with a port in [1, 65535], https://HOST:PORT or unix:PATH";
  }
  if (!tls) endpoint = address;
  return {};
}

std::string CheckSocketMode(std::string& mode) {
  const std::optional<int> bits = ParseNumber<int>(mode, 8);
  // Without the owner's bits the server itself could not detect a stale socket.
  if (bits && *bits >= 0600 && *bits <= 0777) return {};
  return "\"" + mode + "\" must be an octal mode in [0600, 0777], such as 0660";
}

std::string CheckServerId(std::string& id) {
  constexpr size_t kCharactersMax = 64;
  const bool plain = std::all_of(id.begin(), id.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_' || c == '-';
  });
  if (plain && id.size() <= kCharactersMax) return {};
  return '"' + id.substr(0, kCharactersMax) + "\" must be up to " + std::to_string(kCharactersMax) +
         " letters, digits, '.', '_' and '-'";
}

std::string CheckMetricsAddress(std::string& address) {
  if (address == "off" || (ValidAddress(address) && !address.starts_with("unix:"))) return {};
  return "\"" + address + "\" must be HOST:PORT with a port in [0, 65535], or off";
}

std::string CheckDevice(std::string& list) {
  std::string full;
  bool cuda = false;
  bool alone = false;
  std::vector<std::string> names;
  if (list.ends_with(',')) return "\"" + list + "\" must not end with a comma";
  for (const std::string& part : Split(list)) {
    const bool digits = !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) {
      return std::isdigit(c);
    });
    const std::string name = digits && cuda ? "cuda:" + part : part;
    if (!ValidDevice(name)) {
      return "\"" + list + "\" must be auto, cpu, cuda:all or a list such as cuda:0,cuda:1";
    }
    if (std::find(names.begin(), names.end(), name) != names.end()) {
      return "\"" + list + "\" names " + name + " twice";
    }
    cuda = name.starts_with("cuda:");
    alone |= name == "auto" || name == "cuda:all";
    names.push_back(name);
    full += (full.empty() ? "" : ",") + name;
  }
  if (alone && names.size() > 1) return "\"" + list + "\": auto and cuda:all cannot be combined";
  list = full;
  return {};
}

std::string CheckReferenceCheck(std::string& mode) {
  if (mode == "off" || mode == "all") return {};
  constexpr std::string_view kSample = "sample:";
  if (mode.starts_with(kSample)) {
    const std::optional<double> share = ParseNumber<double>(mode.substr(kSample.size()));
    if (share && *share >= 0 && *share <= 1) return {};
  }
  return "\"" + mode + "\" must be off, all or sample:P with P in [0, 1]";
}

std::string CheckKeyPrefix(std::string& prefix) {
  if (prefix.empty()) return {};
  if (prefix[0] == '/' && prefix.find('/', 1) == std::string::npos) return {};
  return "\"" + prefix + "\" must begin with a slash and contain no other";
}

std::string CheckTenant(std::string& text) {
  const Result<Tenant> tenant = ParseTenant(text);
  return tenant.ok() ? std::string() : tenant.status().message();
}

double SampleOf(const std::string& mode) {
  if (mode == "off") return 0;
  return mode == "all" ? 1 : std::stod(mode.substr(mode.find(':') + 1));
}

}  // namespace attend

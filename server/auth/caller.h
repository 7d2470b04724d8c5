// SPDX-License-Identifier: Apache-2.0
//
// The caller of a request, and its permissions.

#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/util/status.h"

namespace attend {

// gRPC's UNAUTHENTICATED, which only authentication returns.
inline constexpr Code kUnauthenticated = static_cast<Code>(16);

// Permissions. Each method requires one of them.
enum class Scope : uint8_t {
  kCompute = 0,  // attention: requests, and memory for them
  kSessions,     // sessions, and requests on them
  kInfo,         // server information and load
  kAdmin,        // operating the server
  kAny,          // required by methods open to every known caller
};
inline constexpr std::array<Scope, 4> kScopes = {Scope::kCompute, Scope::kSessions, Scope::kInfo,
                                                 Scope::kAdmin};
inline constexpr std::array<std::string_view, 5> kScopeNames = {"compute", "sessions", "info",
                                                                "admin", "any"};

constexpr std::string_view ScopeName(Scope scope) {
  return kScopeNames[static_cast<size_t>(scope)];
}
// Never returns kAny.
constexpr std::optional<Scope> ParseScope(std::string_view name) {
  for (const Scope scope : kScopes) {
    if (ScopeName(scope) == name) return scope;
  }
  return std::nullopt;
}

class Scopes {
 public:
  constexpr Scopes() = default;
  // All but the operator's.
  static constexpr Scopes OfUsers() {
    Scopes scopes;
    for (const Scope each : {Scope::kCompute, Scope::kSessions, Scope::kInfo}) scopes.Add(each);
    return scopes;
  }
  constexpr void Add(Scope scope) {
    bits_ = static_cast<uint8_t>(bits_ | (1u << static_cast<unsigned>(scope)));
  }
  constexpr bool Has(Scope scope) const {
    return scope == Scope::kAny || (bits_ >> static_cast<unsigned>(scope) & 1u) != 0;
  }
  constexpr bool none() const { return bits_ == 0; }

 private:
  uint8_t bits_ = 0;
};

// The default: an anonymous caller of a server without authentication.
struct Caller {
  int tenant = 0;  // index into the server's tenants
  Scopes scopes = Scopes::OfUsers();
  bool for_others = false;  // it may act for another tenant, and names it
  // For logs. Null: the server does not authenticate callers.
  std::shared_ptr<const std::string> name = {};

  bool authenticated() const { return name != nullptr; }
};

}  // namespace attend

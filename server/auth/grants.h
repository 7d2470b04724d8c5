// SPDX-License-Identifier: Apache-2.0
//
// What --tokens FILE says: who may call, as which tenant, and what each may do. Immutable once
// parsed. One line for each caller:
//
//   name=ci sha256=HEX tenant=blue scopes=compute,sessions expires=2027-01-31T00:00:00Z
//   name=web uri=spiffe://prod/web tenant=green scopes=compute
//   name=gate dns=gate.example scopes=compute,info any-tenant
//
//   name        in logs; 1 to 64 letters, digits, dots, dashes and underscores; each once
//   sha256      of a token, 64 hexadecimal digits; or, of a client certificate, one of
//   uri, dns    a subject alternative name, and
//   cn          the subject's common name
//   tenant      one of the server's; "default" if it is left out
//   scopes      compute, sessions, info, admin: at least one
//   expires     UTC, to the second or the day alone; without it, never
//   any-tenant  it may speak for other tenants (x-attend-tenant)
//
// Empty lines, and those that begin with #, say nothing. The last line ends too: a file that was
// cut short is refused.

#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/status.h"
#include "server/auth/caller.h"
#include "server/auth/token_digest.h"

namespace attend {

inline constexpr int64_t kTokensFileBytesMax = int64_t{1} << 20;
inline constexpr int64_t kGrantBytesMax = 1024;  // of a line
inline constexpr int64_t kGrantsMax = 1024;
inline constexpr size_t kCallerNameBytesMax = 64;

using WallTime = std::chrono::sys_seconds;
inline constexpr WallTime kNoExpiry = WallTime::max();

// The kinds of names in certificates.
enum class CertificateName { kUri = 0, kDns, kCommon };
inline constexpr int kCertificateNameCount = 3;

struct Grant {
  std::shared_ptr<const std::string> name;
  // Of the token, or of the certificate's name and its kind: the same line's, however often the
  // file is read.
  TokenDigest credential{};
  int tenant = 0;
  Scopes scopes;
  bool any_tenant = false;
  WallTime expires = kNoExpiry;
};

class Grants {
 public:
  // `tenants`: the names of the server's, by index. INVALID_ARGUMENT names the line, and never what
  // stands where a hash should: it may be a token.
  static Result<Grants> Parse(std::string_view text, std::span<const std::string> tenants);

  // Null: nobody's. In constant time for as many tokens as there are.
  const Grant* FindToken(std::string_view token) const;
  const Grant* FindCertificate(CertificateName kind, std::string_view name) const;
  int64_t count() const { return std::ssize(grants_); }
  // Those that have not expired.
  std::set<TokenDigest> Credentials(WallTime now) const;
  // The first time after `now` at which one of them expires; kNoExpiry: never.
  WallTime NextExpiry(WallTime now) const;

 private:
  class Parser;
  std::vector<Grant> grants_;
  std::vector<TokenDigest> digests_;  // of tokens
  std::vector<int> by_digest_;        // the grant of each
  // By name: the grant.
  std::array<std::map<std::string, int, std::less<>>, kCertificateNameCount> by_certificate_;
};

}  // namespace attend

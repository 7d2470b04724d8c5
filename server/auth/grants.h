// SPDX-License-Identifier: Apache-2.0
//
// The callers of --tokens FILE: who may call, for which tenant, with which scopes. Immutable once
// parsed. One line per caller:
//
//   name=ci sha256=HEX tenant=blue scopes=compute,sessions expires=2027-01-31T00:00:00Z
//   name=web uri=spiffe://prod/web tenant=green scopes=compute
//   name=gate dns=gate.example scopes=compute,info any-tenant
//
//   name        in logs; 1 to 64 letters, digits, dots, dashes and underscores; unique
//   sha256      of a token, 64 hexadecimal digits; or, of a client certificate, one of
//   uri, dns    a subject alternative name, and
//   cn          the subject's common name
//   tenant      one of the server's; "default" if omitted
//   scopes      compute, sessions, info, admin: at least one
//   expires     UTC, a time to the second or a day; never if omitted
//   any-tenant  it may act for other tenants (x-attend-tenant)
//
// Empty lines and lines that begin with # are ignored. The last line must end with a newline, so
// that a truncated file is refused.

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
inline constexpr int64_t kGrantBytesMax = 1024;  // per line
inline constexpr int64_t kGrantsMax = 1024;
inline constexpr size_t kCallerNameBytesMax = 64;

using WallTime = std::chrono::sys_seconds;
inline constexpr WallTime kNoExpiry = WallTime::max();

// The kinds of names in certificates.
enum class CertificateName { kUri = 0, kDns, kCommon };
inline constexpr int kCertificateNameCount = 3;

struct Grant {
  std::shared_ptr<const std::string> name;
  // Digest of the token, or of the certificate name with its kind. The same across reloads.
  TokenDigest credential{};
  int tenant = 0;
  Scopes scopes;
  bool any_tenant = false;
  WallTime expires = kNoExpiry;
};

class Grants {
 public:
  // `tenants`: the server's tenant names, by index. INVALID_ARGUMENT names the line, but never
  // repeats a value in place of a hash: it may be a token.
  static Result<Grants> Parse(std::string_view text, std::span<const std::string> tenants);

  // Null if unknown. The time depends on the number of tokens only.
  const Grant* FindToken(std::string_view token) const;
  const Grant* FindCertificate(CertificateName kind, std::string_view name) const;
  int64_t count() const { return std::ssize(grants_); }
  // The credentials that have not expired.
  std::set<TokenDigest> Credentials(WallTime now) const;
  // The earliest expiry after `now`; kNoExpiry if there is none.
  WallTime NextExpiry(WallTime now) const;

 private:
  class Parser;
  std::vector<Grant> grants_;
  std::vector<TokenDigest> digests_;  // of tokens
  std::vector<int> by_digest_;        // index of each digest's grant
  // Certificate name to index of its grant, by kind.
  std::array<std::map<std::string, int, std::less<>>, kCertificateNameCount> by_certificate_;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/auth/grants.h"

#include <openssl/crypto.h>
#include <openssl/err.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "server/util/parse_number.h"

namespace attend {
namespace {

constexpr std::array<std::string_view, kCertificateNameCount> kCertificateKeys = {"uri", "dns",
                                                                                  "cn"};
constexpr std::string_view kCredentialKeys = "sha256=, uri=, dns= or cn=";

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_' || c == '.';
}

std::optional<TokenDigest> ParseDigest(const std::string& text) {
  TokenDigest digest{};
  size_t bytes = 0;
  const bool hex =
      OPENSSL_hexstr2buf_ex(digest.data(), digest.size(), &bytes, text.c_str(), '\0') == 1;
  ERR_clear_error();
  return hex && bytes == digest.size() && text.size() == 2 * bytes ? std::optional(digest)
                                                                   : std::nullopt;
}

// Digits only: ParseNumber accepts a minus sign.
std::optional<int> ParseDigits(std::string_view text) {
  const bool digits =
      std::all_of(text.begin(), text.end(), [](char c) { return '0' <= c && c <= '9'; });
  return digits ? ParseNumber<int>(text) : std::nullopt;
}

// 2027-01-31 or 2027-01-31T12:34:56Z.
std::optional<WallTime> ParseTime(std::string_view text) {
  constexpr size_t kDay = 10, kWhole = 20;
  if (text.size() != kDay && text.size() != kWhole) return std::nullopt;
  if (text[4] != '-' || text[7] != '-') return std::nullopt;
  const auto year = ParseDigits(text.substr(0, 4));
  const auto month = ParseDigits(text.substr(5, 2));
  const auto day = ParseDigits(text.substr(8, 2));
  if (!year || !month || !day) return std::nullopt;
  const std::chrono::year_month_day date(std::chrono::year(*year),
                                         std::chrono::month(static_cast<unsigned>(*month)),
                                         std::chrono::day(static_cast<unsigned>(*day)));
  if (!date.ok()) return std::nullopt;
  const WallTime midnight = std::chrono::sys_days(date);
  if (text.size() == kDay) return midnight;
  if (text[10] != 'T' || text[13] != ':' || text[16] != ':' || text[19] != 'Z') return std::nullopt;
  const auto hour = ParseDigits(text.substr(11, 2));
  const auto minute = ParseDigits(text.substr(14, 2));
  const auto second = ParseDigits(text.substr(17, 2));
  if (!hour || !minute || !second || *hour > 23 || *minute > 59 || *second > 59) {
    return std::nullopt;
  }
  return midnight + std::chrono::hours(*hour) + std::chrono::minutes(*minute) +
         std::chrono::seconds(*second);
}

// Removes and returns the text before the first `separator`, which is removed too.
std::string_view Next(std::string_view& text, char separator) {
  const size_t end = text.find(separator);
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return part;
}

}  // namespace

class Grants::Parser {
 public:
  Parser(std::span<const std::string> tenants, Grants& grants)
      : tenants_(tenants), grants_(grants) {}

  Status TakeLine(std::string_view line, int64_t number) {
    line_ = number;
    if (std::ssize(line) > kGrantBytesMax) {
      return Wrong("has " + std::to_string(line.size()) + " bytes, must have at most " +
                   std::to_string(kGrantBytesMax));
    }
    grant_ = Grant();
    digest_.reset();
    certificate_.reset();
    seen_.clear();
    for (std::string_view rest = line; !rest.empty();) {
      const std::string_view field = Next(rest, ' ');
      if (!field.empty()) ATTEND_RETURN_IF_ERROR(TakeField(field));
    }
    if (seen_.empty()) return Status();
    return Add();
  }

 private:
  Status Wrong(const std::string& what) const {
    return InvalidArgument("line " + std::to_string(line_) + " " + what);
  }

  // Errors do not repeat values: one may be a token.
  Status TakeField(std::string_view field) {
    std::string_view value = field;
    const std::string_view key = Next(value, '=');
    const bool flag = field.find('=') == std::string_view::npos;
    constexpr std::array<std::string_view, 8> kKeys = {"name",   "tenant", "scopes", "expires",
                                                       "sha256", "uri",    "dns",    "cn"};
    const bool known =
        flag ? field == "any-tenant" : std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end();
    if (!known) {
      return Wrong("has an unknown field; known are name=, " + std::string(kCredentialKeys) +
                   ", tenant=, scopes=, expires= and any-tenant");
    }
    if (!seen_.insert(key).second) return Wrong("has " + std::string(key) + " twice");
    if (flag) {
      grant_.any_tenant = true;
      return Status();
    }
    if (key == "name") return TakeName(value);
    if (key == "tenant") return TakeTenant(value);
    if (key == "scopes") return TakeScopes(value);
    if (key == "expires") return TakeExpiry(value);
    return TakeCredential(key, value);
  }

  Status TakeName(std::string_view value) {
    if (value.empty() || value.size() > kCallerNameBytesMax ||
        !std::all_of(value.begin(), value.end(), IsNameCharacter)) {
      return Wrong("has a name that is not 1 to " + std::to_string(kCallerNameBytesMax) +
                   " letters, digits, dots, dashes and underscores");
    }
    if (!names_.emplace(value).second) return Wrong("repeats the name of an earlier line");
    grant_.name = std::make_shared<const std::string>(value);
    return Status();
  }

  Status TakeTenant(std::string_view value) {
    const auto found = std::find(tenants_.begin(), tenants_.end(), value);
    if (found == tenants_.end()) {
      return Wrong("has a tenant that --tenant does not name");
    }
    grant_.tenant = static_cast<int>(found - tenants_.begin());
    return Status();
  }

  Status TakeScopes(std::string_view value) {
    while (!value.empty()) {
      const std::optional<Scope> scope = ParseScope(Next(value, ','));
      if (!scope) return Wrong("has an unknown scope; known are compute, sessions, info and admin");
      grant_.scopes.Add(*scope);
    }
    return Status();
  }

  Status TakeExpiry(std::string_view value) {
    const std::optional<WallTime> time = ParseTime(value);
    if (!time) {
      return Wrong("has an expires that is neither a time such as 2027-01-31T00:00:00Z nor a date");
    }
    grant_.expires = *time;
    return Status();
  }

  Status TakeCredential(std::string_view key, std::string_view value) {
    if (digest_ || certificate_) {
      return Wrong("has more than one of " + std::string(kCredentialKeys));
    }
    if (key == "sha256") {
      digest_ = ParseDigest(std::string(value));
      if (!digest_) return Wrong("has a sha256 that is not 64 hexadecimal digits");
      return Status();
    }
    if (value.empty()) return Wrong("has an empty " + std::string(key));
    const auto kind = std::find(kCertificateKeys.begin(), kCertificateKeys.end(), key);
    certificate_ = {static_cast<size_t>(kind - kCertificateKeys.begin()), std::string(value)};
    return Status();
  }

  Status Add() {
    if (grant_.name == nullptr) return Wrong("has no name");
    if (!digest_ && !certificate_) return Wrong("has none of " + std::string(kCredentialKeys));
    if (grant_.scopes.none()) return Wrong("has no scopes");
    if (grants_.count() == kGrantsMax) {
      return Wrong("exceeds the limit of " + std::to_string(kGrantsMax) + " callers");
    }
    const auto index = static_cast<int>(grants_.count());
    bool first = true;
    if (digest_) {
      grant_.credential = *digest_;
      first = digests_.insert(*digest_).second;
      grants_.digests_.push_back(*digest_);
      grants_.by_digest_.push_back(index);
    } else {
      grant_.credential =
          DigestOf(std::string(kCertificateKeys[certificate_->first]) + "=" + certificate_->second);
      first = grants_.by_certificate_[certificate_->first]
                  .emplace(std::move(certificate_->second), index)
                  .second;
    }
    if (!first) return Wrong("repeats the token or certificate of an earlier line");
    grants_.grants_.push_back(std::move(grant_));
    return Status();
  }

  const std::span<const std::string> tenants_;
  Grants& grants_;
  std::set<std::string, std::less<>> names_;
  std::set<TokenDigest> digests_;
  // State of the current line:
  int64_t line_ = 0;
  Grant grant_;
  std::optional<TokenDigest> digest_;
  std::optional<std::pair<size_t, std::string>> certificate_;
  std::set<std::string_view> seen_;
};

Result<Grants> Grants::Parse(std::string_view text, std::span<const std::string> tenants) {
  if (std::ssize(text) > kTokensFileBytesMax) {
    return InvalidArgument("it has more than " + std::to_string(kTokensFileBytesMax) + " bytes");
  }
  if (!text.empty() && text.back() != '\n') {
    return InvalidArgument("its last line has no line break: the file was cut short");
  }
  Grants grants;
  Parser parser(tenants, grants);
  for (int64_t number = 1; !text.empty(); ++number) {
    const std::string_view line = Next(text, '\n');
    if (line.starts_with('#')) continue;
    ATTEND_RETURN_IF_ERROR(parser.TakeLine(line, number));
  }
  if (grants.count() == 0) return InvalidArgument("it contains no callers");
  return grants;
}

const Grant* Grants::FindToken(std::string_view token) const {
  const int found = FindDigest(digests_, DigestOf(token));
  return found < 0 ? nullptr
                   : &grants_[static_cast<size_t>(by_digest_[static_cast<size_t>(found)])];
}

std::set<TokenDigest> Grants::Credentials(WallTime now) const {
  std::set<TokenDigest> credentials;
  for (const Grant& grant : grants_) {
    if (grant.expires > now) credentials.insert(grant.credential);
  }
  return credentials;
}

WallTime Grants::NextExpiry(WallTime now) const {
  WallTime next = kNoExpiry;
  for (const Grant& grant : grants_) {
    if (grant.expires > now) next = std::min(next, grant.expires);
  }
  return next;
}

const Grant* Grants::FindCertificate(CertificateName kind, std::string_view name) const {
  const auto& names = by_certificate_[static_cast<size_t>(kind)];
  const auto found = names.find(name);
  return found == names.end() ? nullptr : &grants_[static_cast<size_t>(found->second)];
}

}  // namespace attend

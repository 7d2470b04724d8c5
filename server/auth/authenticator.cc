// SPDX-License-Identifier: Apache-2.0
//
// Grants are immutable and replaced as a whole. Decide works on a snapshot, a shared pointer copied
// under the lock, so a reload delays calls by no more than the swap.

#include "server/auth/authenticator.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "server/util/whole_file.h"

namespace attend {
namespace {

Decision Refuse(CallerRefusal refusal, std::string message) {
  return {{}, Status(kUnauthenticated, std::move(message)), refusal};
}

// The token in "Bearer TOKEN"; the scheme's name is case-insensitive (RFC 9110).
std::optional<std::string_view> TokenIn(std::string_view authorization) {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size()) return std::nullopt;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = authorization[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c) != kScheme[i]) {
      return std::nullopt;
    }
  }
  const std::string_view token = authorization.substr(kScheme.size());
  const bool sized = kTokenBytesMin <= token.size() && token.size() <= kTokenBytesMax;
  const bool plain =
      std::all_of(token.begin(), token.end(), [](char c) { return '!' <= c && c <= '~'; });
  return sized && plain ? std::optional(token) : std::nullopt;
}

// The grant of the token or certificate; null: `refused` has the reason.
const Grant* Find(const Grants& grants, const Credentials& credentials, Decision& refused) {
  if (credentials.authorization) {
    if (!credentials.encrypted && !credentials.local) {
      refused = Refuse(CallerRefusal::kCleartext,
                       "the token was sent in the clear: tokens are accepted only over TLS, "
                       "loopback and Unix sockets; replace it, as others may have read it");
      return nullptr;
    }
    const std::optional<std::string_view> token = TokenIn(*credentials.authorization);
    if (!token) {
      refused = Refuse(CallerRefusal::kUnknown,
                       "the metadata authorization must be \"Bearer TOKEN\", with a token of " +
                           std::to_string(kTokenBytesMin) + " to " +
                           std::to_string(kTokenBytesMax) + " visible characters");
      return nullptr;
    }
    const Grant* const grant = grants.FindToken(*token);
    if (grant == nullptr) refused = Refuse(CallerRefusal::kUnknown, "the token is unknown");
    return grant;
  }
  for (const Credentials::Name& name : credentials.certificate) {
    if (const Grant* const grant = grants.FindCertificate(name.kind, name.text)) return grant;
  }
  refused = credentials.certificate.empty()
                ? Refuse(CallerRefusal::kNoCredentials,
                         "no token: the call must have the metadata authorization, \"Bearer "
                         "TOKEN\"")
                : Refuse(CallerRefusal::kUnknown,
                         "no token, and no name in the client's certificate is known");
  return nullptr;
}

}  // namespace

Result<Grants> Authenticator::Read() const {
  const auto wrong = [this](Code code, const std::string& why) {
    return Status(code, "tokens " + options_.file + ": " + why);
  };
  mode_t mode = 0;
  const Result<std::string> text = ReadWholeFile(options_.file, kTokensFileBytesMax, &mode);
  if (!text.ok()) {
    const Status& status = text.status();
    return wrong(status.code(), "it" + status.message().substr(options_.file.size()));
  }
  if ((mode & S_IWOTH) != 0) return wrong(Code::kInvalidArgument, "any user may write to it");
  Result<Grants> grants = Grants::Parse(*text, options_.tenants);
  if (!grants.ok()) return wrong(Code::kInvalidArgument, grants.status().message());
  return grants;
}

void Authenticator::Use(Grants grants) {
  next_expiry_ = grants.NextExpiry(options_.now());
  auto shared = std::make_shared<const Grants>(std::move(grants));
  {
    const MutexLock lock(mutex_);
    grants_.swap(shared);
  }
  generation_.fetch_add(1, std::memory_order_release);
}

Result<std::unique_ptr<Authenticator>> Authenticator::Load(Options options) {
  std::unique_ptr<Authenticator> made(new Authenticator(std::move(options)));
  made->stamp_ = StampOf(made->options_.file);
  Result<Grants> grants = made->Read();
  if (!grants.ok()) return InvalidArgument(grants.status().message());
  made->Use(std::move(*grants));
  return made;
}

void Authenticator::Reload() {
  if (const WallTime now = options_.now(); now >= next_expiry_) {
    next_expiry_ = grants()->NextExpiry(now);
    generation_.fetch_add(1, std::memory_order_release);
  }
  // Taken before the read, so that a change during the read is noticed by the next Reload.
  const FileStamp stamp = StampOf(options_.file);
  if (stamp == stamp_) return;
  Result<Grants> read = Read();
  const bool unavailable = read.status().code() == Code::kUnavailable;
  stamp_ = unavailable ? std::nullopt : std::optional(stamp);
  const std::string unread = unavailable ? read.status().message() : "";
  const bool reported = !unread.empty() && unread == unread_;
  unread_ = unread;
  if (read.ok()) Use(std::move(*read));
  if (options_.on_reload && !reported) {
    options_.on_reload(read.ok() ? Status() : read.status(), count());
  }
}

Decision Authenticator::Decide(const Credentials& credentials, Scope scope) const {
  const std::shared_ptr<const Grants> grants = this->grants();
  Decision decision;
  const Grant* const grant = Find(*grants, credentials, decision);
  if (grant == nullptr) return decision;
  if (grant->expires <= options_.now()) {
    return Refuse(CallerRefusal::kExpired, credentials.authorization
                                               ? "the token has expired"
                                               : "the certificate's entry in --tokens has expired");
  }
  const auto deny = [&](CallerRefusal refusal, std::string message) {
    // A denied call is charged to the caller's own tenant, not to the one it names.
    decision.caller.tenant = grant->tenant;
    decision.status = Status(Code::kPermissionDenied, std::move(message));
    decision.refusal = refusal;
    return decision;
  };
  Caller& caller = decision.caller;
  caller = {grant->tenant, grant->scopes, grant->any_tenant, grant->name};
  decision.credential = grant->credential;
  const std::string& own = options_.tenants[static_cast<size_t>(grant->tenant)];
  if (credentials.tenant && *credentials.tenant != own) {
    if (!grant->any_tenant) {
      return deny(CallerRefusal::kTenant, "the caller belongs to tenant \"" + own +
                                              "\" and may not call for another (x-attend-tenant)");
    }
    const auto named =
        std::find(options_.tenants.begin(), options_.tenants.end(), *credentials.tenant);
    if (named == options_.tenants.end()) {
      return deny(CallerRefusal::kTenant, "x-attend-tenant names none of the server's tenants");
    }
    caller.tenant = static_cast<int>(named - options_.tenants.begin());
  }
  if (!grant->scopes.Has(scope)) {
    return deny(CallerRefusal::kScope, "the caller \"" + *grant->name + "\" lacks the scope " +
                                           std::string(ScopeName(scope)));
  }
  return decision;
}

}  // namespace attend

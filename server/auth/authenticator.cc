// SPDX-License-Identifier: Apache-2.0
//
// Grants are immutable and replaced as a whole. Decide works on a snapshot, a shared pointer copied
// under the lock, so a reload delays calls by no more than the swap.

#include "server/auth/authenticator.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "server/util/unique_fd.h"

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

bool Authenticator::FileState::operator==(const FileState& other) const {
  const auto same = [](const timespec& a, const timespec& b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
  };
  return device == other.device && inode == other.inode && bytes == other.bytes &&
         same(modified, other.modified) && same(changed, other.changed);
}

Authenticator::FileState Authenticator::StateOf(const std::string& path) {
  struct stat about {};
  if (stat(path.c_str(), &about) != 0) return {};
  return {about.st_dev, about.st_ino, about.st_size, about.st_mtim, about.st_ctim};
}

Result<Grants> Authenticator::Read(std::optional<FileState>& state) const {
  const auto wrong = [this](const std::string& why) {
    return InvalidArgument("tokens " + options_.file + ": " + why);
  };
  // Taken before the read, so that a change during the read is noticed by the next Reload.
  state = StateOf(options_.file);
  const auto unread = [&] {
    const Status status = wrong(std::string("it cannot be read: ") + std::strerror(errno));
    state.reset();
    return status;
  };
  const UniqueFd file(open(options_.file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about {};
  if (!file.valid() || fstat(file.get(), &about) != 0) return unread();
  if (!S_ISREG(about.st_mode)) return wrong("it is not a regular file");
  if ((about.st_mode & S_IWOTH) != 0) return wrong("any user may write to it");
  std::string text;
  text.resize(static_cast<size_t>(kTokensFileBytesMax) + 1);
  size_t got = 0;
  while (got < text.size()) {
    const ssize_t bytes = read(file.get(), text.data() + got, text.size() - got);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return unread();
    if (bytes == 0) break;
    got += static_cast<size_t>(bytes);
  }
  text.resize(got);
  Result<Grants> grants = Grants::Parse(text, options_.tenants);
  if (!grants.ok()) return wrong(grants.status().message());
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
  Result<Grants> grants = made->Read(made->state_);
  if (!grants.ok()) return grants.status();
  made->Use(std::move(*grants));
  return made;
}

void Authenticator::Reload() {
  if (const WallTime now = options_.now(); now >= next_expiry_) {
    next_expiry_ = grants()->NextExpiry(now);
    generation_.fetch_add(1, std::memory_order_release);
  }
  if (StateOf(options_.file) == state_) return;
  std::optional<FileState> state;
  Result<Grants> read = Read(state);
  state_ = state;
  const std::string unread = read.ok() || state ? "" : read.status().message();
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

// SPDX-License-Identifier: Apache-2.0
//
// Identifies the caller by its token or client certificate, and refuses unknown callers and those
// without permission. An unauthenticated caller learns only what its call lacks, nothing about the
// server. Thread-safe; never blocks.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/auth/caller.h"
#include "server/auth/grants.h"
#include "server/util/file_stamp.h"

namespace attend {

inline constexpr char kAuthorizationMetadataKey[] = "authorization";
// Length of the text after "Bearer ": shorter tokens can be guessed, longer ones cost time to hash.
inline constexpr size_t kTokenBytesMin = 16;
inline constexpr size_t kTokenBytesMax = 512;

// The credentials of a call. The views must stay valid only during Decide.
struct Credentials {
  struct Name {
    CertificateName kind;
    std::string_view text;
  };
  std::optional<std::string_view> authorization = {};
  std::span<const Name> certificate = {};  // of a verified certificate
  std::optional<std::string_view> tenant = {};
  bool encrypted = false;
  bool local = false;  // the client is on this host
};

// Why a call was refused.
enum class CallerRefusal {
  kNoCredentials = 0,
  kUnknown,
  kExpired,
  kCleartext,  // a token over a connection that others could read
  kTenant,     // it named a tenant that it may not speak for
  kScope,
};

struct Decision {
  Caller caller;  // with PERMISSION_DENIED, its tenant is the caller's own
  Status status;  // OK, UNAUTHENTICATED or PERMISSION_DENIED
  CallerRefusal refusal = CallerRefusal::kNoCredentials;
  TokenDigest credential = {};  // identifies the caller's credential
};

class Authenticator {
 public:
  struct Options {
    std::string file;
    std::vector<std::string> tenants = {"default"};  // names, by index
    std::function<WallTime()> now;
    // Called after each attempt to reload a changed file, with the number of callers now.
    std::function<void(const Status&, int64_t callers)> on_reload = {};
  };

  // Reads the file. An error names the file, the line and the fault.
  static Result<std::unique_ptr<Authenticator>> Load(Options options);

  // May throw std::bad_alloc.
  Decision Decide(const Credentials& credentials, Scope scope) const;

  // Reads the file again if it was replaced or modified. An unusable file changes nothing and is
  // reported once; after a read error of the system, the next call tries again. Not from two
  // threads at once.
  void Reload();

  // Changes whenever Decide may answer differently than before: after a reload, and once Reload has
  // seen a grant expire. Never 0.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  int64_t count() const { return grants()->count(); }
  // Identifies the credentials that are valid now.
  std::set<TokenDigest> credentials() const { return grants()->Credentials(options_.now()); }

 private:
  explicit Authenticator(Options options) : options_(std::move(options)) {}
  // UNAVAILABLE: the system cannot read the file now.
  Result<Grants> Read() const;
  void Use(Grants grants);
  std::shared_ptr<const Grants> grants() const {
    const MutexLock lock(mutex_);
    return grants_;
  }

  const Options options_;
  // Used by Reload only:
  std::optional<FileStamp> stamp_;  // of the version read last; none if it could not be read
  std::string unread_;              // the last read error, already reported
  WallTime next_expiry_ = kNoExpiry;
  std::atomic<uint64_t> generation_{0};
  mutable Mutex mutex_;
  std::shared_ptr<const Grants> grants_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

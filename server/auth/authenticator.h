// SPDX-License-Identifier: Apache-2.0
//
// Says who makes a call, by the token or the certificate that comes with it, and refuses those that
// are unknown or may not. What it tells a stranger is what the call lacks, and nothing of the
// server. Thread-safe; a call waits for nobody.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <ctime>
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

namespace attend {

inline constexpr char kAuthorizationMetadataKey[] = "authorization";
// Of the text after "Bearer ". Shorter ones can be guessed, longer ones cost time.
inline constexpr size_t kTokenBytesMin = 16;
inline constexpr size_t kTokenBytesMax = 512;

// What a call brings. The texts need only live for the question.
struct Credentials {
  struct Name {
    CertificateName kind;
    std::string_view text;
  };
  std::optional<std::string_view> authorization = {};
  std::span<const Name> certificate = {};  // of a certificate that was verified
  std::optional<std::string_view> tenant = {};
  bool encrypted = false;
  bool local = false;  // the client is on this host
};

// Why a call was refused.
enum class CallerRefusal {
  kNoCredentials = 0,
  kUnknown,
  kExpired,
  kCleartext,  // a token that everybody on the way could read
  kTenant,     // it speaks for another tenant
  kScope,
};

struct Decision {
  Caller caller;  // of PERMISSION_DENIED: with its own tenant
  Status status;  // OK, UNAUTHENTICATED or PERMISSION_DENIED
  CallerRefusal refusal = CallerRefusal::kNoCredentials;
  TokenDigest credential = {};  // by which the caller is known
};

class Authenticator {
 public:
  struct Options {
    std::string file;
    std::vector<std::string> tenants = {"default"};  // names, by index
    std::function<WallTime()> now;
    // Told how each look at a changed file ended, and of how many callers there are now.
    std::function<void(const Status&, int64_t callers)> on_reload = {};
  };

  // Reads the file. Errors name it and what is wrong, in which line.
  static Result<std::unique_ptr<Authenticator>> Load(Options options);

  // May throw std::bad_alloc.
  Decision Decide(const Credentials& credentials, Scope scope) const;

  // Reads the file again if it is another or has changed. A file that cannot be used changes
  // nothing, and is reported once; where the system could not read it, the next call tries again.
  // Not from two threads at once.
  void Reload();

  // Another number whenever Decide may say something else of a caller than before: Reload has read
  // the file, or has seen that something in it expired. Never 0.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  int64_t count() const { return grants()->count(); }
  // By which callers are known now.
  std::set<TokenDigest> credentials() const { return grants()->Credentials(options_.now()); }

 private:
  // Which file, and which state of it.
  struct FileState {
    dev_t device = 0;
    ino_t inode = 0;
    off_t bytes = -1;  // -1: there is none
    timespec modified{}, changed{};
    bool operator==(const FileState& other) const;
  };

  explicit Authenticator(Options options) : options_(std::move(options)) {}
  static FileState StateOf(const std::string& path);
  // `state`: what was read; nothing where the system could not read it.
  Result<Grants> Read(std::optional<FileState>& state) const;
  void Use(Grants grants);
  std::shared_ptr<const Grants> grants() const {
    const MutexLock lock(mutex_);
    return grants_;
  }

  const Options options_;
  // Reload's:
  std::optional<FileState> state_;
  std::string unread_;  // why it could not be read; it has been reported
  WallTime next_expiry_ = kNoExpiry;
  std::atomic<uint64_t> generation_{0};
  mutable Mutex mutex_;
  std::shared_ptr<const Grants> grants_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

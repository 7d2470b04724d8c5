// SPDX-License-Identifier: Apache-2.0
//
// The certificates that the clients of open connections have shown, so that whoever would not be
// let in again is found once the server's files have changed, though it sends nothing.

#pragma once

#include <openssl/x509.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "kernels/util/mutex.h"
#include "server/tls/openssl_free.h"
#include "server/tls/tls_context.h"

namespace attend {

// Of one connection. OpenSSL counts references to certificates atomically.
struct TlsClient {
  struct FreeChain {
    void operator()(STACK_OF(X509) * chain) const { sk_X509_pop_free(chain, X509_free); }
  };
  int socket = -1;
  ino_t inode = 0;
  Certificate certificate;
  std::unique_ptr<STACK_OF(X509), FreeChain> chain;  // what came with it; may be null
  std::atomic<bool> refused{false};                  // so that it is told of once
};

// Thread-safe.
class TlsClients {
 public:
  void Add(std::shared_ptr<TlsClient> client);  // may throw std::bad_alloc
  void Remove(const std::shared_ptr<TlsClient>& client);
  // Calls `refuse` for each client that `context` would not let in, unless it has been told of.
  // Connections begin and end meanwhile.
  void Recheck(const TlsContext& context,
               const std::function<void(const TlsClient& client, const std::string& why)>& refuse);

 private:
  Mutex mutex_;
  std::set<std::shared_ptr<TlsClient>> clients_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

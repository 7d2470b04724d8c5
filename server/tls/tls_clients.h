// SPDX-License-Identifier: Apache-2.0
//
// The certificates presented by the clients of open connections. When the server's files change,
// clients that would no longer be accepted can be found even if they send nothing.

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

// One connection's client. OpenSSL reference-counts certificates atomically.
struct TlsClient {
  struct FreeChain {
    void operator()(STACK_OF(X509) * chain) const { sk_X509_pop_free(chain, X509_free); }
  };
  int socket = -1;
  ino_t inode = 0;
  Certificate certificate;
  // The intermediate certificates it presented; may be null.
  std::unique_ptr<STACK_OF(X509), FreeChain> chain;
  std::atomic<bool> refused{false};  // so that it is reported once
};

// Thread-safe.
class TlsClients {
 public:
  void Add(std::shared_ptr<TlsClient> client);  // may throw std::bad_alloc
  void Remove(const std::shared_ptr<TlsClient>& client);
  // Calls `refuse` for each client that `context` would not accept, unless already reported.
  // Connections may begin and end concurrently.
  void Recheck(const TlsContext& context,
               const std::function<void(const TlsClient& client, const std::string& why)>& refuse);

 private:
  Mutex mutex_;
  std::set<std::shared_ptr<TlsClient>> clients_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

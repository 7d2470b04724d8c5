// SPDX-License-Identifier: Apache-2.0

#include "server/tls/tls_clients.h"

#include <utility>
#include <vector>

namespace attend {

void TlsClients::Add(std::shared_ptr<TlsClient> client) {
  const MutexLock lock(mutex_);
  clients_.insert(std::move(client));
}

void TlsClients::Remove(const std::shared_ptr<TlsClient>& client) {
  const MutexLock lock(mutex_);
  clients_.erase(client);
}

void TlsClients::Recheck(
    const TlsContext& context,
    const std::function<void(const TlsClient& client, const std::string& why)>& refuse) {
  std::vector<std::shared_ptr<TlsClient>> clients;
  {
    const MutexLock lock(mutex_);
    clients.assign(clients_.begin(), clients_.end());
  }
  for (const std::shared_ptr<TlsClient>& client : clients) {
    const std::string why = context.VerifyError(client->certificate.get(), client->chain.get());
    if (!why.empty() && !client->refused.exchange(true)) refuse(*client, why);
  }
}

}  // namespace attend

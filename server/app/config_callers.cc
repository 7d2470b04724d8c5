// SPDX-License-Identifier: Apache-2.0
//
// Settings for authentication.

#include "server/app/config_group.h"

namespace attend {

void AddCallers(CLI::App& app, Config& c) {
  Group group(app, "Callers");
  group.Text("--tokens", c.tokens, "FILE", nullptr,
             "Callers that may connect, one per line: the hash of a token or a name in a "
             "certificate, with tenant and scopes (server/auth/README.md). Reloaded when it "
             "changes. Empty: anyone who can connect may call");
}

void CheckCallers(const Config& c) {
  if (c.tokens.empty() || !c.tls_cert.empty()) return;
  for (const std::string& address : c.listen) {
    if (address.starts_with("unix:") || IsLocalOrNowhere(address)) continue;
    throw CLI::ValidationError(
        "--tokens", "with --listen " + address +
                        " tokens would be sent in the clear: give --tls-cert and --tls-key");
  }
}

}  // namespace attend

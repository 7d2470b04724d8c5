// SPDX-License-Identifier: Apache-2.0
//
// Settings for authentication.

#include "server/app/config_group.h"

namespace attend {

void AddCallers(CLI::App& app, Config& c) {
  Group group(app, "Callers");
  group.Text("--tokens", c.tokens, "FILE", nullptr,
             "Who may call: tokens' hashes and certificates' names, with tenant and scopes, a line "
             "each (server/auth/README.md). It is read again when it changes. Empty: whoever can "
             "connect");
}

void CheckCallers(const Config& c) {
  if (c.tokens.empty() || !c.tls_cert.empty()) return;
  for (const std::string& address : c.listen) {
    if (address.starts_with("unix:") || IsLocalOrNowhere(address)) continue;
    throw CLI::ValidationError("--tokens", "with --listen " + address +
                                               " tokens would come in the clear: give --tls-cert "
                                               "and --tls-key");
  }
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Settings for who may call.

#include "server/app/config_group.h"

namespace attend {

void AddCallers(CLI::App& app, Config& c) {
  Group group(app, "Callers");
  group.Text("--tokens", c.tokens, "FILE", nullptr,
             "Who may call: tokens' hashes and certificates' names, with tenant and scopes, a line "
             "each (server/auth/README.md). It is read again when it changes. Empty: whoever can "
             "connect");
}

}  // namespace attend

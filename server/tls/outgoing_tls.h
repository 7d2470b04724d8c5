// SPDX-License-Identifier: Apache-2.0
//
// Whom this process trusts, and what it shows, where it is itself a client.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend {

struct OutgoingTls {
  // Paths, or, once they are read, what the files have, in PEM. Empty: the system's authorities,
  // and no certificate.
  std::string ca;
  std::string cert;
  std::string key;
};

// Reads the files of the settings PREFIX-ca, PREFIX-cert and PREFIX-key. An error names the
// setting, its file, and what is wrong: no certificate in it, a key that is another's.
Result<OutgoingTls> ReadOutgoingTls(const std::string& prefix, const OutgoingTls& paths);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The trust and identity of this process where it is a TLS client.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend {

struct OutgoingTls {
  // Paths or, once read, the contents of the files in PEM. Empty: the system's authorities, and no
  // certificate.
  std::string ca;
  std::string cert;
  std::string key;
};

// Reads the files of the settings PREFIX-ca, PREFIX-cert and PREFIX-key. An error names the
// setting, its file and the problem: no certificate in it, or a key of another certificate.
Result<OutgoingTls> ReadOutgoingTls(const std::string& prefix, const OutgoingTls& paths);

}  // namespace attend

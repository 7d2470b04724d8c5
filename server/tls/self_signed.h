// SPDX-License-Identifier: Apache-2.0
//
// A fresh key with a self-signed certificate, trusted only by those it is given to.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend {

struct KeyAndCertificate {
  std::string key;
  std::string certificate;  // both in PEM
};

// Valid for one day.
Result<KeyAndCertificate> MakeSelfSigned(const std::string& common_name);

}  // namespace attend

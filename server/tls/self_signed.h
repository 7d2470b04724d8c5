// SPDX-License-Identifier: Apache-2.0
//
// A fresh key with a certificate that it has signed itself, so that only who is given it trusts it.

#pragma once

#include <string>

#include "kernels/util/status.h"

namespace attend {

struct KeyAndCertificate {
  std::string key;
  std::string certificate;  // both in PEM
};

// Valid for a day.
Result<KeyAndCertificate> MakeSelfSigned(const std::string& common_name);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// NumPy's .npy files: float16, float32 and bool, little-endian, C order. Strict: everything else is
// an error that names the file and the reason.

#pragma once

#include <string>

#include "client/call/tensor.h"

namespace attend::client {

// A bool array becomes a tensor of bits.
Result<HostTensor> ReadNpy(const std::string& path);

// FAILED_PRECONDITION: bfloat16, which the format does not have, or bits.
Status WriteNpy(const std::string& path, const HostTensor& tensor);

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// NumPy's .npy files: float16 and float32, little-endian, C order. Strict: anything else is an
// error that names the file and the reason.

#pragma once

#include <string>

#include "client/call/tensor.h"

namespace attend::client {

Result<HostTensor> ReadNpy(const std::string& path);

// FAILED_PRECONDITION for bfloat16, which the format does not know.
Status WriteNpy(const std::string& path, const HostTensor& tensor);

}  // namespace attend::client

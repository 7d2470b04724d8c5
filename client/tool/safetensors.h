// SPDX-License-Identifier: Apache-2.0
//
// .safetensors files: eight bytes of header length, a JSON header, then the tensors' bytes. Reads
// float16, bfloat16, float32 and bool (as bits); strict as the format requires: the tensors cover
// the data without overlap or gap. Errors name the file and the reason.

#pragma once

#include <map>
#include <string>

#include "client/call/tensor.h"

namespace attend::client {

inline bool IsSafetensors(const std::string& path) { return path.ends_with(".safetensors"); }

// Loads only the tensors named in `wanted`; the others must still be well-formed.
Result<std::map<std::string, HostTensor>> ReadSafetensors(const std::string& path,
                                                          const std::vector<std::string>& wanted);

// FAILED_PRECONDITION: a tensor of bits.
Status WriteSafetensors(const std::string& path, const std::map<std::string, HostTensor>& tensors);

}  // namespace attend::client

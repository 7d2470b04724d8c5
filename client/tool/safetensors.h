// SPDX-License-Identifier: Apache-2.0
//
// .safetensors files: eight bytes of header length, a JSON header, the tensors' bytes. float16,
// bfloat16, float32 and bool are read, bool as bits; strict as the format asks: the tensors cover
// the data without overlap or hole. Errors name the file and the reason.

#pragma once

#include <map>
#include <string>

#include "client/call/tensor.h"

namespace attend::client {

inline bool IsSafetensors(const std::string& path) { return path.ends_with(".safetensors"); }

// Only the tensors called `wanted` are loaded; the others must be well-formed all the same.
Result<std::map<std::string, HostTensor>> ReadSafetensors(const std::string& path,
                                                          const std::vector<std::string>& wanted);

// FAILED_PRECONDITION for bits.
Status WriteSafetensors(const std::string& path, const std::map<std::string, HostTensor>& tensors);

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Booleans in files, one byte each, as bit masks.

#pragma once

#include "client/call/tensor.h"
#include "client/tool/file_io.h"

namespace attend::client {

// TensorBytes of a tensor as it is in a file.
Result<int64_t> BytesInFile(std::string_view what, DType dtype, const std::vector<int64_t>& shape);

// Reads the file's next booleans, as many as `shape` has, as a tensor of DType::kBit. Every byte
// but 0 is true.
Result<HostTensor> ReadBools(InputFile& file, std::vector<int64_t> shape);

// INVALID_ARGUMENT: the tensor from `path` is of bits, which only a bias may be.
Status MustBeNumbers(const std::string& path, const HostTensor& tensor);

}  // namespace attend::client

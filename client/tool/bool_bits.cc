// SPDX-License-Identifier: Apache-2.0

#include "client/tool/bool_bits.h"

#include <algorithm>
#include <utility>

namespace attend::client {

Result<int64_t> BytesInFile(std::string_view what, DType dtype, const std::vector<int64_t>& shape) {
  if (dtype != DType::kBit) return TensorBytes(what, dtype, shape);
  const Result<int64_t> twice = TensorBytes(what, DType::kFloat16, shape);
  return twice.ok() ? Result<int64_t>(*twice / 2) : twice;
}

Result<HostTensor> ReadBools(InputFile& file, std::vector<int64_t> shape) {
  if (shape.empty()) return file.Error("one boolean, must be an array of them");
  const int64_t columns = shape.back();
  Result<HostTensor> tensor = HostTensor::Make(file.path(), DType::kBit, std::move(shape));
  if (!tensor.ok() || tensor->bytes == 0) return tensor;
  const int64_t row_bytes = RowBytes(DType::kBit, columns);
  std::vector<uint8_t> row(static_cast<size_t>(columns));
  for (int64_t at = 0; at < tensor->bytes; at += row_bytes) {
    ATTEND_RETURN_IF_ERROR(file.Read(row.data(), columns));
    auto* const bits = reinterpret_cast<uint8_t*>(tensor->data.get()) + at;
    std::fill_n(bits, row_bytes, uint8_t{0});
    for (size_t j = 0; j < row.size(); ++j) {
      if (row[j] != 0) bits[j / 8] = static_cast<uint8_t>(bits[j / 8] | 1u << (j % 8));
    }
  }
  return tensor;
}

Status MustBeNumbers(const std::string& path, const HostTensor& tensor) {
  if (tensor.dtype != DType::kBit) return Status();
  return InvalidArgument(path + ": booleans, which only bias may be");
}

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0

#include "server/wire/validate_lengths.h"

#include <algorithm>
#include <utility>

namespace attend {
namespace {

Status CheckDense(const WireArrays& arrays, const std::string& name, ArrayField field,
                  int64_t batch, int64_t bound, const char* bound_name) {
  const int64_t entries = arrays.size(field);
  if (entries == 0) return Status();
  if (entries != batch) {
    return WrongCount(name, entries, "B = " + std::to_string(batch) + ", or 0");
  }
  Status status;
  arrays.ForEach<int64_t>(field, [&](int64_t i, int64_t length) {
    if (length >= 0 && length <= bound) return true;
    status =
        InvalidArgument(name + "[" + std::to_string(i) + "] is " + std::to_string(length) +
                        ", must be in [0, " + bound_name + " = " + std::to_string(bound) + "]");
    return false;
  });
  return status;
}

Status DenseLengths(const WireArrays& arrays, const Problem& problem) {
  for (const auto& [name, field] :
       {std::pair{"cu_q", ArrayField::kCuQ}, std::pair{"cu_kv", ArrayField::kCuKv}}) {
    if (arrays.size(field) > 0) {
      return WrongCount(name, arrays.size(field), "none unless layout is LHD");
    }
  }
  ATTEND_RETURN_IF_ERROR(
      CheckDense(arrays, "q_lengths", ArrayField::kQLengths, problem.batch, problem.len_q, "Lq"));
  return CheckDense(arrays, "kv_lengths", ArrayField::kKvLengths, problem.batch, problem.len_k,
                    "Lk");
}

Status CheckOffsets(const WireArrays& arrays, const std::string& name, ArrayField field,
                    int64_t rows, int64_t& longest) {
  if (arrays.size(field) == 0) return WrongCount(name, 0, "B + 1 in layout LHD");
  Status status;
  int64_t last = 0;
  arrays.ForEach<int64_t>(field, [&](int64_t i, int64_t offset) {
    if (i == 0 && offset != 0) {
      status = InvalidArgument(name + "[0] is " + std::to_string(offset) + ", must be 0");
    } else if (offset < last || offset > rows) {
      status =
          InvalidArgument(name + "[" + std::to_string(i) + "] is " + std::to_string(offset) +
                          ", must be in [" + std::to_string(last) + ", " + std::to_string(rows) +
                          "]: offsets never fall and never exceed the rows");
    }
    if (!status.ok()) return false;
    longest = std::max(longest, offset - last);  // both are in [0, rows]
    last = offset;
    return true;
  });
  if (!status.ok() || last == rows) return status;
  return InvalidArgument(name + "[" + std::to_string(arrays.size(field) - 1) + "] is " +
                         std::to_string(last) + ", must equal the rows " + std::to_string(rows));
}

Status PackedLengths(const WireArrays& arrays, Problem& problem) {
  for (const auto& [name, field] : {std::pair{"q_lengths", ArrayField::kQLengths},
                                    std::pair{"kv_lengths", ArrayField::kKvLengths}}) {
    if (arrays.size(field) > 0) {
      return WrongCount(name, arrays.size(field), "none in layout LHD");
    }
  }
  ATTEND_RETURN_IF_ERROR(
      CheckOffsets(arrays, "cu_q", ArrayField::kCuQ, problem.total_q, problem.len_q));
  ATTEND_RETURN_IF_ERROR(
      CheckOffsets(arrays, "cu_kv", ArrayField::kCuKv, problem.total_k, problem.len_k));
  const int64_t entries = arrays.size(ArrayField::kCuQ);
  if (entries != arrays.size(ArrayField::kCuKv)) {
    return WrongCount("cu_kv", arrays.size(ArrayField::kCuKv),
                      "as many as cu_q, " + std::to_string(entries));
  }
  problem.batch = entries - 1;
  return Status();
}

}  // namespace

Status WrongCount(std::string_view field, int64_t entries, const std::string& bound) {
  return InvalidArgument(std::string(field) + " has " + std::to_string(entries) +
                         " entries, must have " + bound);
}

Status CheckLengths(const WireArrays& arrays, Problem& problem) {
  return problem.packed ? PackedLengths(arrays, problem) : DenseLengths(arrays, problem);
}

}  // namespace attend

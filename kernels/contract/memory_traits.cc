// SPDX-License-Identifier: Apache-2.0

#include "kernels/contract/memory_traits.h"

#include <algorithm>
#include <string>

namespace attend {
namespace {

// Bytes for contiguous copies of the tensors whose D or Dv is not a multiple of 8; 0 if copying
// does not help.
int64_t ContiguousRepackBytes(const Problem& p) {
  if (p.page_rows > 0 || (p.has_bias && p.bias_as_q && p.len_k % 8 != 0)) return 0;
  const int64_t batch = p.packed ? 1 : p.batch;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  int64_t sum = 0;
  const auto add = [&](int64_t heads, int64_t rows, int64_t columns) {
    if (columns % 8 == 0) return true;
    const Result<int64_t> bytes = RepackedBytes(batch, heads, rows, columns);
    return bytes.ok() && !__builtin_add_overflow(sum, *bytes, &sum);
  };
  const bool fits = add(p.heads_q, p.packed ? p.total_q : p.len_q, p.dim) &&
                    add(p.heads_kv, rows_k, p.dim) && add(p.heads_kv, rows_k, p.dim_v);
  return fits ? sum : 0;
}

}  // namespace

Result<int64_t> RepackedBytes(int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  constexpr int64_t kPiece = 256;
  constexpr int64_t kVector = 8;                      // elements
  constexpr int64_t kSequenceMax = int64_t{1} << 36;  // as kTmaStrideMax of cuda/ragged
  const int64_t row_bytes = (columns + kVector - 1) / kVector * 16;
  constexpr std::string_view kWhat = "bytes of a copy on 16-byte boundaries";
  const Result<int64_t> sequence = CheckedProduct(kWhat, heads, rows, row_bytes);
  if (!sequence.ok()) return sequence;
  if (*sequence >= kSequenceMax) {
    return InvalidArgument(std::string(kWhat) + " of one sequence are " +
                           std::to_string(*sequence) + ", must be below " +
                           std::to_string(kSequenceMax));
  }
  const Result<int64_t> bytes = CheckedProduct(kWhat, batch, *sequence);  // below 2^56
  if (!bytes.ok()) return bytes;
  return std::max((*bytes + kPiece - 1) / kPiece * kPiece, kPiece);
}

MemoryTraits ContiguousTraits(const Problem& problem) {
  if (problem.dim % 8 != 0 || problem.dim_v % 8 != 0) {
    return {.not_tma =
                "D or Dv is not a multiple of 8: Hopper's copy engine needs rows on 16-byte "
                "boundaries",
            .repack_bytes = ContiguousRepackBytes(problem)};
  }
  if (problem.has_bias && problem.bias_as_q && problem.len_k % 8 != 0) {
    return {.not_tma =
                "Lk is not a multiple of 8: cuda_flash_sm90 needs rows of a bias on 16-byte "
                "boundaries"};
  }
  return {};
}

}  // namespace attend

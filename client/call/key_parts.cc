// SPDX-License-Identifier: Apache-2.0

#include "client/call/key_parts.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace attend::client {
namespace {

// The mask's bound, at most `farthest`; a negative bound means none.
int64_t Reach(int64_t bound, int64_t farthest) {
  return bound < 0 ? farthest : std::min(bound, farthest);
}

// The part's mask. Its rows and keys are counted from other origins than the whole's.
MaskOption MaskOfPart(const MaskOption& whole, int64_t all_rows, int64_t keys, const KeyPart& part,
                      const RowRange& rows) {
  MaskOption mask = whole;
  const bool top_left = MaskOf(whole).alignment == Alignment::kTopLeft;
  // The mask sees only offset differences, so q rows that are left out move into key_offset and
  // keys_after. Bottom-right aligns the last row with the last key: rows left out at the end come
  // off keys_after. Top-left aligns the first ones: rows left out at the beginning come off
  // key_offset.
  mask.key_offset = part.begin - (top_left ? rows.begin : 0);
  mask.keys_after = keys - part.end - (top_left ? 0 : all_rows - rows.end);
  return mask;
}

Result<TensorRef> BiasOfPart(const TensorRef& bias, const KeyPart& part, const RowRange& rows) {
  Result<TensorRef> cut = RangeOf("bias", bias, 3, part.begin, part.end);
  if (!cut.ok() || bias.shape[2] == 1) return cut;
  return RangeOf("bias", *cut, 2, rows.begin, rows.end);
}

}  // namespace

Result<TensorRef> RangeOf(std::string_view name, const TensorRef& tensor, size_t dimension,
                          int64_t begin, int64_t end) {
  if (dimension >= tensor.shape.size() || begin < 0 || begin > end ||
      end > tensor.shape[dimension]) {
    return InvalidArgument(std::string(name) + " has the shape " + ShapeText(tensor.shape) +
                           ", its dimension " + std::to_string(dimension) + " must have [" +
                           std::to_string(begin) + ", " + std::to_string(end) + ")");
  }
  const bool whole = begin == 0 && end == tensor.shape[dimension];
  if (whole && tensor.owner != nullptr) return tensor;
  std::vector<int64_t> shape = tensor.shape;
  shape[dimension] = end - begin;
  Result<HostTensor> made = HostTensor::Make(name, tensor.dtype, std::move(shape));
  if (!made.ok()) return made.status();
  if (made->bytes == 0) return TensorRef(*made);
  // Each of the `outer` slices is contiguous: copy `to` bytes from `skip` on. Bits along the last
  // dimension are packed eight to a byte.
  int64_t outer = 1;
  for (size_t i = 0; i < dimension; ++i) outer *= tensor.shape[i];
  const bool bits = tensor.dtype == DType::kBit && dimension + 1 == tensor.shape.size();
  const int64_t from = tensor.bytes / outer, to = made->bytes / outer;
  const int64_t skip = bits ? begin / 8 : from / tensor.shape[dimension] * begin;
  if (bits && begin % 8 != 0) {
    return InvalidArgument(std::string(name) + " is cut at bit " + std::to_string(begin) +
                           ", must be at a multiple of 8");
  }
  for (int64_t i = 0; i < outer; ++i) {
    std::memcpy(made->data.get() + i * to,
                static_cast<const std::byte*>(tensor.data) + i * from + skip,
                static_cast<size_t>(to));
  }
  return TensorRef(*made);
}

RowRange RowsThatSee(const attend::Mask& mask, int64_t rows, int64_t keys, int64_t begin,
                     int64_t end) {
  if (begin >= end) return {};
  // Row i sees keys [i + diagonal - left, i + diagonal + right].
  const int64_t diagonal = mask.alignment == Alignment::kTopLeft ? 0 : keys - rows;
  const int64_t left = Reach(mask.left, keys + rows), right = Reach(mask.right, keys + rows);
  const int64_t first = std::clamp<int64_t>(begin - right - diagonal, 0, rows);
  return {first, std::clamp<int64_t>(end + left - diagonal, first, rows)};
}

Result<AttentionCall> PartOf(const AttentionCall& call, int64_t keys, const KeyPart& part,
                             const RowRange& rows) {
  AttentionCall cut = call;
  const size_t dimension = RowDimension(call.layout);
  Result<TensorRef> q = RangeOf("q", call.q, dimension, rows.begin, rows.end);
  if (!q.ok()) return q.status();
  cut.q = *std::move(q);
  cut.k = cut.v = TensorRef();
  if (part.send < part.end) {
    const int64_t first = keys - call.k.shape[dimension];  // position of the call's first own key
    Result<TensorRef> k = RangeOf("k", call.k, dimension, part.send - first, part.end - first);
    if (!k.ok()) return k.status();
    Result<TensorRef> v = RangeOf("v", call.v, dimension, part.send - first, part.end - first);
    if (!v.ok()) return v.status();
    cut.k = *std::move(k);
    cut.v = *std::move(v);
  }
  cut.sinks.clear();
  cut.o_float32 = cut.return_lse = true;
  if (rows.size() == 0) {  // only appends
    cut.mask = {};
    cut.bias.reset();
    return cut;
  }
  if (call.bias) {
    Result<TensorRef> bias = BiasOfPart(*call.bias, part, rows);
    if (!bias.ok()) return bias.status();
    cut.bias = *std::move(bias);
  }
  cut.mask = MaskOfPart(call.mask, call.q.shape[dimension], keys, part, rows);
  return cut;
}

}  // namespace attend::client

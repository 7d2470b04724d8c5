// SPDX-License-Identifier: Apache-2.0
//
// Whether a view can be addressed by TMA is decided once, in FaultOf, by the rules of
// cuTensorMapEncodeTiled: 16-byte base and strides, strides below kTmaStrideMax, 32-bit
// coordinates. Broadcast dimensions become extents of 1; pages take the place of sequences.

#include "kernels/cuda/ragged/tensor_maps.h"

#include <algorithm>

#include "kernels/cuda/ragged/operands.h"

namespace attend::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looked up in the driver at run time, so that nothing links against it.
EncodeTiled FindEncodeTiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTiled>(function)
             : nullptr;
}

constexpr int64_t kAlignment = 16;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kRowsMax = INT32_MAX;  // coordinates have 32 bits
constexpr int64_t kPagesMax = INT32_MAX;

// Whether TMA can walk the dimension. A stride of 0 (broadcast) is never walked, see Extent.
bool StrideFits(int64_t extent, int64_t stride) {
  if (extent <= 1 || stride == 0) return true;
  return stride > 0 && stride < kTmaStrideMax / kElementBytes &&
         stride * kElementBytes % kAlignment == 0;
}

enum Fault { kNone, kRows, kBase, kStride };

Fault FaultOf(const ConstTensorView& view, int64_t batch, int64_t heads, int64_t rows) {
  if (rows > kRowsMax) return kRows;
  if (reinterpret_cast<uintptr_t>(view.data) % kAlignment != 0) return kBase;
  const bool fits = StrideFits(batch, view.stride_b) && StrideFits(heads, view.stride_h) &&
                    (rows <= 1 || (view.stride_l > 0 && StrideFits(rows, view.stride_l)));
  return fits ? kNone : kStride;
}

// Indexed by tensor (Q, K, V) and Fault.
constexpr std::string_view kClauses[3][4] = {
    {"", "Hopper's copy engine takes fewer than 2^31 rows, q has more",
     "q does not begin on a 16-byte boundary, as Hopper's copy engine needs",
     "a stride of q is not a multiple of 16 bytes in (0, 2^36), as Hopper's kernels need"},
    {"", "Hopper's copy engine takes fewer than 2^31 rows, k has more",
     "k does not begin on a 16-byte boundary, as Hopper's copy engine needs",
     "a stride of k is not a multiple of 16 bytes in (0, 2^36), as Hopper's kernels need"},
    {"", "Hopper's copy engine takes fewer than 2^31 rows, v has more",
     "v does not begin on a 16-byte boundary, as Hopper's copy engine needs",
     "a stride of v is not a multiple of 16 bytes in (0, 2^36), as Hopper's kernels need"}};

// A broadcast dimension has one element, which every index refers to (BroadcastIndex).
cuuint64_t Extent(int64_t extent, int64_t stride) {
  return static_cast<cuuint64_t>(stride == 0 ? 1 : std::max<int64_t>(extent, 1));
}
cuuint64_t StrideBytes(int64_t extent, int64_t stride) {
  return static_cast<cuuint64_t>(extent <= 1 || stride == 0 ? kAlignment : stride * kElementBytes);
}

// Whether every element of O has its own address: no stride is 0.
bool Distinct(const Attention& a) {
  return (a.problem.batch <= 1 || a.o.stride_b != 0) &&
         (a.problem.heads_q <= 1 || a.o.stride_h != 0) && a.o.stride_l != 0;
}

struct Shape {
  int64_t dim, rows, heads, batch;
};

// Whether dropout's rows are aligned with the kernel's tiles of weights.
bool RowsBeginTiles(const Attention& a) {
  return a.problem.dropout == 0 || a.dropout.row % kDropoutTile == 0;
}

ConstTensorView ViewOf(const BiasView& bias) {
  return {bias.data, bias.stride_b, bias.stride_h, bias.stride_q};
}

// Shape of K; pages take the place of sequences.
Shape KeysShape(const Problem& p) {
  if (p.page_rows > 0) return {p.dim, p.page_rows, p.heads_kv, kPagesMax};
  return {p.dim, p.packed ? p.total_k : p.len_k, p.heads_kv, p.packed ? 1 : p.batch};
}

TensorBox KeysBox(const Problem& p, const TensorBox& box) {
  if (p.page_rows == 0) return box;
  return {PageBoxRows(static_cast<int>(p.page_rows), box.rows), box.cols};
}

bool Encode(EncodeTiled encode, const ConstTensorView& view, const Shape& shape, DType dtype,
            const TensorBox& box, CUtensorMap* map) {
  // An empty tensor is never loaded, but its map needs an address.
  static const char kNowhere alignas(kAlignment) = 0;
  const void* data = view.data == nullptr ? &kNowhere : view.data;
  const cuuint64_t extents[] = {
      static_cast<cuuint64_t>(std::max<int64_t>(shape.dim, 1)), Extent(shape.rows, view.stride_l),
      Extent(shape.heads, view.stride_h), Extent(shape.batch, view.stride_b)};
  const cuuint64_t strides[] = {StrideBytes(shape.rows, view.stride_l),
                                StrideBytes(shape.heads, view.stride_h),
                                StrideBytes(shape.batch, view.stride_b)};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box.cols), static_cast<cuuint32_t>(box.rows),
                              1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMapSwizzle swizzle =
      box.cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(map, type, 4, const_cast<void*>(data), extents, strides, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool LoadsBias(const Attention& a) {
  const Problem& p = a.problem;
  if (!p.has_bias || HasBits(a)) return true;
  return reinterpret_cast<uintptr_t>(a.bias.data) % kAlignment == 0 &&
         StrideFits(p.batch, a.bias.stride_b) && StrideFits(p.heads_q, a.bias.stride_h) &&
         StrideFits(p.len_q, a.bias.stride_q);
}

std::string_view WhyNotTma(const Attention& a) {
  const Problem& p = a.problem;
  const int64_t batch = p.packed ? 1 : p.batch;
  const bool paged = p.page_rows > 0;
  const int64_t rows_k = paged ? p.page_rows : p.packed ? p.total_k : p.len_k;
  const int64_t batch_k = paged ? 2 : batch;  // at least two pages
  const Fault faults[] = {FaultOf(a.q, batch, p.heads_q, p.packed ? p.total_q : p.len_q),
                          FaultOf(a.k, batch_k, p.heads_kv, rows_k),
                          FaultOf(a.v, batch_k, p.heads_kv, rows_k)};
  if (!RowsBeginTiles(a)) {
    return "dropout on Hopper needs rows that begin at a multiple of 16 of the whole's";
  }
  if (paged && a.k.stride_b == 0) return kClauses[1][kStride];
  if (paged && a.v.stride_b == 0) return kClauses[2][kStride];
  if (!LoadsBias(a)) {
    return "the bias's rows do not begin on 16-byte boundaries, as Hopper's copy engine needs";
  }
  for (int n = 0; n < 3; ++n) {
    if (faults[n] != kNone) return kClauses[n][faults[n]];
  }
  return {};
}

std::array<Operand, 3> OperandsOf(const Attention& a) {
  const Problem& p = a.problem;
  const int64_t batch = p.packed ? 1 : p.batch;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  std::array<Operand, 3> operands = {
      Operand{a.q, p.heads_q, p.packed ? p.total_q : p.len_q, p.dim, false},
      Operand{a.k, p.heads_kv, rows_k, p.dim, false},
      Operand{a.v, p.heads_kv, rows_k, p.dim_v, false}};
  if (p.page_rows > 0 || !RowsBeginTiles(a) || !LoadsBias(a)) return operands;
  Fault faults[3];
  for (int n = 0; n < 3; ++n) {
    faults[n] = FaultOf(operands[n].view, batch, operands[n].heads, operands[n].rows);
    if (faults[n] == kRows) return operands;
  }
  for (int n = 0; n < 3; ++n) operands[n].copied = faults[n] != kNone;
  return operands;
}

cudaError_t EncodeTensorMaps(const Attention& a, const TensorBoxes& boxes, TensorMaps* maps) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  const Problem& p = a.problem;
  const int64_t batch = p.packed ? 1 : p.batch;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const Shape keys = KeysShape(p);
  const Shape values{p.dim_v, keys.rows, keys.heads, keys.batch};
  bool ok = Encode(encode, a.q, {p.dim, rows_q, p.heads_q, batch}, p.dtype, boxes.q, &maps->q) &&
            Encode(encode, a.k, keys, p.dtype, KeysBox(p, boxes.k), &maps->k) &&
            Encode(encode, a.v, values, p.dtype, KeysBox(p, boxes.v), &maps->v);
  const ConstTensorView o{a.o.data, a.o.stride_b, a.o.stride_h, a.o.stride_l};
  // Not if a packed sequence may end inside a box, which would overwrite the next one's rows, nor
  // if the last columns are not a multiple of 16 bytes, all of which a box would write.
  const bool biased = p.has_bias && !HasBits(a);
  if (biased && boxes.o.rows > 0) {
    const ConstTensorView bias = ViewOf(a.bias);
    ok = ok &&
         Encode(encode, bias, {p.len_k, p.len_q, p.heads_q, p.batch}, p.dtype, boxes.o, &maps->o);
  }
  maps->writes_o = !biased && !p.packed && !p.o_float32 && p.dim_v % 8 == 0 && boxes.o.rows > 0 &&
                   Distinct(a) && FaultOf(o, batch, p.heads_q, rows_q) == kNone;
  if (maps->writes_o) {
    ok = ok && Encode(encode, o, {p.dim_v, rows_q, p.heads_q, batch}, p.dtype, boxes.o, &maps->o);
  }
  return ok ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace attend::cuda

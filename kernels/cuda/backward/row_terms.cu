// SPDX-License-Identifier: Apache-2.0
//
// The backward pass's terms of each query row, and the gradients of sinks, which need nothing else.
// Memory that the pass accumulates into is cleared first. Also decides which rows are measured:
// those with a large LSE (IsMeasured) and those whose delta O's rounding spoils (common_parts.cuh).

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/backward/common_parts.cuh"
#include "kernels/cuda/backward/launch_list.cuh"
#include "kernels/cuda/ptx/device_math.cuh"

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = 4;  // rows per lane

// ---- before -------------------------------------------------------------------------------------

struct PrepareItem {
  BackwardPass pass;
  int64_t heads;       // so many first blocks each compute one head's common parts
  int64_t term_bytes;  // from the flags on
  int64_t turn_bytes;  // of counters
  int64_t share;       // bytes that a block clears
};

constexpr int64_t kClearBytes = 32 << 10;  // about, per block, at most
constexpr int kClearUnit = sizeof(uint4);

// Clears bytes [begin, end), all multiples of kClearUnit.
__device__ __forceinline__ void Clear(void* from, int64_t begin, int64_t end) {
  auto* const units = static_cast<uint4*>(from);
  for (int64_t n = begin / kClearUnit + threadIdx.x; n < end / kClearUnit; n += kThreads) {
    units[n] = make_uint4(0, 0, 0, 0);
  }
}

template <int kCount>
__global__ void __launch_bounds__(kThreads, 4)
    Prepare(const __grid_constant__ LaunchList<PrepareItem, kCount> list) {
  __shared__ MomentScratch scratch;
  static_assert(MomentScratch::kThreads == kThreads);
  const PrepareItem& item = list.Of(blockIdx.x);
  const BackwardPass& pass = item.pass;
  const int64_t block = blockIdx.x - pass.first_block;
  const int64_t begin = block * item.share;
  const int64_t end = begin + item.share;
  Clear(pass.flags, begin, min(end, item.term_bytes));
  Clear(pass.turns, max(begin - item.term_bytes, int64_t{0}),
        min(end - item.term_bytes, item.turn_bytes));
  if (block < item.heads) StoreCommonParts(pass, static_cast<uint32_t>(block), scratch);
}

// ---- terms --------------------------------------------------------------------------------------

ATTEND_HD int64_t BlocksOfHead(const Problem& p, int lanes) {
  const int64_t rows = kEach * kThreads / lanes;
  return (p.len_q + rows - 1) / rows;
}

// Rows of 16-bit elements with every eight elements 16-byte aligned.
template <class View>
__device__ __forceinline__ bool EightAligned(const View& view, const Problem& p) {
  return DTypeBytes(p.o_dtype()) == 2 && p.dim_v % 8 == 0 &&
         reinterpret_cast<uint64_t>(view.data) % 16 == 0 && view.stride_b % 8 == 0 &&
         view.stride_h % 8 == 0 && view.stride_l % 8 == 0;
}

// Dot product of eight elements.
__device__ __forceinline__ float DotEight(DType dtype, const uint4& x, const uint4& y) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    sum = fmaf(ElementOf(dtype, x, n), ElementOf(dtype, y, n), sum);
  }
  return sum;
}
__device__ __forceinline__ float DotFloats(const void* x, int64_t at_x, const void* y, int64_t at_y,
                                           int64_t count) {
  float sum = 0.0f;
  for (int64_t n = 0; n < min(count, int64_t{8}); ++n) {
    sum = fmaf(static_cast<const float*>(x)[at_x + n], static_cast<const float*>(y)[at_y + n], sum);
  }
  return sum;
}

template <int kLanes>
__device__ __forceinline__ float SumOfRow(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// Share of O, in squares, that is the rows' own rather than common to a warp's 16-bit rows; 1 for
// NaN. Independent of dO, which seldom favours the columns that values have in common.
template <int kLanes>
__device__ __forceinline__ float OwnShare(DType dtype, const uint4 (&x)[kEach], int existing) {
  float sums[8] = {};
  float size = 0.0f;
  auto rows = static_cast<float>(existing);
#pragma unroll
  for (int n = 0; n < kEach * 8; ++n) {
    const float o = ElementOf(dtype, x[n / 8], n % 8);
    sums[n % 8] += o;
    size = fmaf(o, o, size);
  }
#pragma unroll
  for (int distance = kLanes; distance < 32; distance *= 2) {
    rows += __shfl_xor_sync(0xffffffffu, rows, distance);
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  float common = 0.0f;
#pragma unroll
  for (const float sum : sums) common = fmaf(sum, sum, common);
  // Deviations from the sample mean underestimate the spread.
  size = WarpSum(size);
  common = SumOfRow<kLanes>(common);
  const float own = fmaxf(size - common / rows, 0.0f) * rows / (rows - 1.0f);
  if (rows == 1.0f) return size > 0.0f ? 0.0f : 1.0f;  // only keys and values decide
  return own < size ? own / size : 1.0f;
}

// Stores row i's terms; `less` is delta - dLSE. `own`: OwnShare.
__device__ __forceinline__ void StoreTerms(const BackwardPass& pass, const Sequence& s, int64_t b,
                                           int64_t h, int64_t i, float lse, float less, float own) {
  const Problem& p = pass.attention.problem;
  const bool measured = IsMeasured(p, lse);
  if (measured) pass.flags->measure = 1;
  // Inf in dO times values of both signs gives NaN, which O, their mean, hides.
  if (isinf(less)) {
    const ConstTensorView& d_o = pass.gradients.d_o;
    const int64_t d_o_row = b * d_o.stride_b + h * d_o.stride_h + (s.q_row + i) * d_o.stride_l;
    for (int64_t n = 0; n < p.dim_v; ++n) {
      if (NonFinite(LoadGlobal(d_o.data, p.o_dtype(), d_o_row + n))) less = NAN;
    }
  }
  const int64_t term = TermIndex(p, s, b, h, i);
  if (NonFinite(less) || !(lse < INFINITY)) pass.flags->special = 1;
  // Usually decided without reading memory.
  if (own * kSpoilt < 1.0f && !measured) {
    const KeyRange keys = VisibleKeys(p.mask, s, i);
    if (CommonParts::Of(pass, b, h)->Spoil(own, keys.end - keys.begin, p.dtype)) {
      pass.flags->doubted = 1;
      pass.doubt[term] = 1.0f;
    }
  }
  pass.less[term] = less;
  pass.lse[term] = lse == NegativeInfinity() ? INFINITY : lse * pass.lse_unit;
}

// dO . O of the nth of a lane's rows, for the nth of the rows' lanes.
template <int kLanes>
__device__ __forceinline__ float DotRows(DType dtype, const uint4 (&x)[kEach],
                                         const uint4 (&y)[kEach]) {
  float found = 0.0f;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const float dot = SumOfRow<kLanes>(DotEight(dtype, x[n], y[n]));
    if (threadIdx.x % kLanes == n) found = dot;
  }
  return found;
}
// The same of floats, `columns` from element `in_x` and `in_y` of the head on, and rows from
// `first` on.
template <int kLanes>
__device__ __forceinline__ float DotFloatRows(const TensorView& x, const ConstTensorView& y,
                                              int64_t in_x, int64_t in_y, int64_t first,
                                              int64_t rows, int64_t columns) {
  float found = 0.0f;
#pragma unroll 1
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * (kThreads / kLanes);
    float dot = 0.0f;
    if (i < rows) {
      dot = DotFloats(x.data, in_x + i * x.stride_l, y.data, in_y + i * y.stride_l, columns);
    }
    dot = SumOfRow<kLanes>(dot);
    if (threadIdx.x % kLanes == n) found = dot;
  }
  return found;
}

// kLanes adjacent lanes process a row, eight elements each, then kEach - 1 further rows.
template <int kLanes, int kCount>
__global__ void __launch_bounds__(kThreads, kCount == 1 ? 3 : 2)
    RowTerms(const __grid_constant__ LaunchList<PassItem, kCount> list) {
  constexpr int kRowsAtOnce = kThreads / kLanes;
  const BackwardPass& pass = list.Of(blockIdx.x).pass;
  const uint32_t block = blockIdx.x - pass.first_block;
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const ConstTensorView& d_o = pass.gradients.d_o;
  const auto tiles = static_cast<uint32_t>(BlocksOfHead(p, kLanes));
  const int64_t head = block / tiles;
  const int64_t h = head % p.heads_q;
  const int64_t b = head / p.heads_q;
  const Sequence s = SequenceOf(a, b);
  const int64_t first =
      static_cast<int64_t>(block % tiles) * kEach * kRowsAtOnce + threadIdx.x / kLanes;
  const int64_t col = threadIdx.x % kLanes * 8;
  const int64_t o = b * a.o.stride_b + h * a.o.stride_h + s.q_row * a.o.stride_l + col;
  const int64_t other = b * d_o.stride_b + h * d_o.stride_h + s.q_row * d_o.stride_l + col;
  const bool whole = EightAligned(a.o, p) && EightAligned(d_o, p);
  const bool narrow = DTypeBytes(p.o_dtype()) == 2;
  // The nth of a row's lanes stores the terms of the nth row.
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t row = first + lane * kRowsAtOnce;
  const bool stores = lane < kEach && row < s.q_len;
  const int64_t in_lse = b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + row;
  const float lse = stores ? a.lse[in_lse] : 0.0f;
  const float d_lse =
      stores && pass.gradients.d_lse != nullptr ? pass.gradients.d_lse[in_lse] : 0.0f;
  uint4 x[kEach] = {}, y[kEach] = {};
  int existing = 0;
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * kRowsAtOnce;
    if (i < s.q_len) ++existing;
    if (!narrow || i >= s.q_len || col >= p.dim_v) continue;
    x[n] = LoadEight(a.o.data, o + i * a.o.stride_l, p.dim_v - col, whole);
    y[n] = LoadEight(d_o.data, other + i * d_o.stride_l, p.dim_v - col, whole);
  }
  float own = 1.0f;
  float less = 0.0f;
  const auto reduce = [&](DType dtype) {
    if (SpoilsDelta(p)) own = OwnShare<kLanes>(dtype, x, existing);
    less = DotRows<kLanes>(dtype, x, y);
  };
  if (p.o_dtype() == DType::kBFloat16) {  // constants, as a choice for each element is slow
    reduce(DType::kBFloat16);
  } else if (narrow) {
    reduce(DType::kFloat16);
  } else {
    less = DotFloatRows<kLanes>(a.o, d_o, o, other, first, s.q_len, p.dim_v - col);
  }
  if (stores) StoreTerms(pass, s, b, h, row, lse, less - d_lse, own);
}

template <int kLanes>
cudaError_t LaunchRowTerms(Passes passes, cudaStream_t stream) {
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) {
    const Problem& p = pass.attention.problem;
    items.push_back({{pass}, BlocksOfHead(p, kLanes) * p.heads_q * p.batch});
  }
  return LaunchItems(RowTerms<kLanes, 1>, RowTerms<kLanes, kItemsMax>, std::move(items), {kThreads},
                     stream);
}

// A sink this far above a row's shift, in powers of two, has all of the weight. The LSE of a row
// without a shift is below it: at most kShiftedLse, or 400 of scores that cuda_flash_sm90 caps: at
// up to 256, which is 369 powers of two, and 2^30 keys.
constexpr double kFarSink = 512;

// The sink's weight in a measured row. Its difference to LSE is only as exact as LSE in fp32, which
// may be as large as the sink. So if LSE equals what the sink alone gives, the weight is 1; LSE is
// Inf if there are no keys, or if the sink exceeds fp32.
__device__ __forceinline__ double MeasuredSinkWeight(const BackwardPass& pass, int64_t term,
                                                     float sink) {
  const bool products = pass.lse_unit == kLog2E;
  const float unit = products ? pass.attention.problem.scale * kLog2E : kLog2E;
  const double shift = static_cast<double>(pass.shift[term]) * static_cast<double>(unit);
  const double above = SinkAbove(sink, shift);
  const float lse = pass.lse[term];
  const double alone = products ? above : above * 0.6931471805599453;
  if (isinf(lse) || above > kFarSink || static_cast<float>(alone) == lse) return 1.0;
  return exp2(above - (products ? 1.0 : 1.4426950408889634) * static_cast<double>(lse));
}

// One block per head; threads take rows in turn, and their sums are added in a fixed order. In
// double: there are few terms, of any size.
template <int kCount>
__global__ void __launch_bounds__(kThreads)
    SinkGradients(const __grid_constant__ LaunchList<PassItem, kCount> list) {
  const BackwardPass& pass = list.Of(blockIdx.x).pass;
  const Attention& a = pass.attention;
  const Problem& p = a.problem;
  const int64_t h = blockIdx.x - pass.first_block;
  const float sink = a.sinks[h];
  double sum = 0.0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t i = threadIdx.x; i < s.q_len; i += kThreads) {
      const float given = a.lse[b * a.lse_stride_b + h * a.lse_stride_h + s.q_row + i];
      const int64_t term = TermIndex(p, s, b, h, i);
      if (isinf(sink) || isinf(given)) continue;
      const double weight = IsMeasured(p, given)
                                ? MeasuredSinkWeight(pass, term, sink)
                                : exp(static_cast<double>(sink) - static_cast<double>(given));
      sum -= weight * pass.less[term];
    }
  }
  __shared__ double sums[kWarps];
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int n = 1; n < kWarps; ++n) sum += sums[n];
  pass.gradients.d_sinks[h] = static_cast<float>(sum);
}

}  // namespace

cudaError_t LaunchPrepare(Passes passes, cudaStream_t stream) {
  std::vector<ItemBlocks<PrepareItem>> items;
  for (const BackwardPass& pass : passes) {
    const Problem& p = pass.attention.problem;
    PrepareItem item{.pass = pass, .heads = 0, .term_bytes = 0, .turn_bytes = 0, .share = 0};
    if (pass.flags != nullptr) {
      const int64_t terms = TermsOfHead(p) * p.heads_q + kTermSlack;
      item.term_bytes =
          kTermFlagBytes + RedoBytes(p) + 4 * terms * static_cast<int64_t>(sizeof(float));
      if (SpoilsDelta(p)) item.heads = p.batch * p.heads_q;
    }
    if (pass.turns != nullptr) item.turn_bytes = TurnCounterBytes(TurnTilesOfHead(p) * p.heads_q);
    const int64_t bytes = item.term_bytes + item.turn_bytes;
    const int64_t blocks = std::max(item.heads, (bytes + kClearBytes - 1) / kClearBytes);
    if (blocks > 0) item.share = (bytes / blocks + kClearUnit) / kClearUnit * kClearUnit;
    items.push_back({item, blocks});
  }
  return LaunchItems(Prepare<1>, Prepare<kItemsMax>, std::move(items), {kThreads}, stream);
}

cudaError_t LaunchRowTerms(Passes passes, cudaStream_t stream) {
  const int64_t dim = passes.front().attention.problem.dim_v;
  if (dim <= 64) return LaunchRowTerms<8>(passes, stream);
  if (dim <= 128) return LaunchRowTerms<16>(passes, stream);
  return LaunchRowTerms<32>(passes, stream);
}

cudaError_t LaunchSinkGradients(Passes passes, cudaStream_t stream) {
  if (passes.front().gradients.d_sinks == nullptr) return cudaSuccess;
  std::vector<ItemBlocks<PassItem>> items;
  for (const BackwardPass& pass : passes) {
    items.push_back({{pass}, pass.attention.problem.heads_q});
  }
  return LaunchItems(SinkGradients<1>, SinkGradients<kItemsMax>, std::move(items), {kThreads},
                     stream);
}

}  // namespace attend::cuda

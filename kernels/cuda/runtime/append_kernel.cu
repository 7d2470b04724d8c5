// SPDX-License-Identifier: Apache-2.0
//
// One warp copies one row of K or V of one sequence and head to its page, found through the page
// table; the sequence's length already counts the new rows, so they end there.

#include "kernels/cuda/runtime/append_kernel.h"

#include <algorithm>
#include <cstdint>

#include "kernels/contract/dtype.h"

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfBlock = kThreads / 32;  // at a time: one warp per row
constexpr int64_t kBlocksMax = 1024;         // per item
constexpr int kItemsMax = 16;                // per launch

// The rows of K, or of V. Strides are in bytes.
struct Side {
  const char* rows;
  char* pages;
  int64_t from_b, from_h, from_l;
  int64_t page, to_h, to_l;
  int32_t row_bytes;
  int32_t unit;  // bytes per access, which divide every address
};

struct Work {
  Side k, v;
  const int32_t* pages;
  const int64_t* kv_lengths;  // null: all are len_k
  int64_t pages_stride, len_k;
  int64_t batch, heads, rows;
  int32_t page_rows;
};

struct AppendParams {
  Work items[kItemsMax];
};
static_assert(sizeof(AppendParams) <= 4096);  // larger parameters take longer to launch

template <class Unit>
__device__ void CopyRow(char* to, const char* from, int bytes) {
  constexpr int kUnit = static_cast<int>(sizeof(Unit));
  for (int n = static_cast<int>(threadIdx.x) % 32; n < bytes / kUnit; n += 32) {
    reinterpret_cast<Unit*>(to)[n] = reinterpret_cast<const Unit*>(from)[n];
  }
}

__device__ void WriteRow(const Work& work, const Side& side, int64_t b, int64_t h, int64_t n) {
  const int64_t length = work.kv_lengths == nullptr ? work.len_k : work.kv_lengths[b];
  const int64_t key = length - work.rows + n;
  const int64_t page = work.pages[b * work.pages_stride + key / work.page_rows];
  const char* const from = side.rows + b * side.from_b + h * side.from_h + n * side.from_l;
  char* const to = side.pages + page * side.page + h * side.to_h + key % work.page_rows * side.to_l;
  if (side.unit == 16) {
    CopyRow<uint4>(to, from, side.row_bytes);
  } else if (side.unit == 4) {
    CopyRow<uint32_t>(to, from, side.row_bytes);
  } else {
    CopyRow<uint16_t>(to, from, side.row_bytes);
  }
}

// blockIdx.y is the item; blockIdx.z selects K or V.
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ AppendParams all) {
  const Work& work = all.items[blockIdx.y];
  const Side& side = blockIdx.z == 0 ? work.k : work.v;
  const int64_t count = work.batch * work.heads * work.rows;
  const int64_t first = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32;
  for (int64_t n = first; n < count; n += int64_t{gridDim.x} * kRowsOfBlock) {
    const int64_t head = n / work.rows;
    WriteRow(work, side, head / work.heads, head % work.heads, n % work.rows);
  }
}

Side SideOf(const Problem& p, const ConstTensorView& pages, const ConstTensorView& rows,
            int64_t dim) {
  const int64_t size = DTypeBytes(p.dtype);
  Side side;
  side.rows = static_cast<const char*>(rows.data);
  side.pages = static_cast<char*>(const_cast<void*>(pages.data));
  side.from_b = rows.stride_b * size;
  side.from_h = rows.stride_h * size;
  side.from_l = rows.stride_l * size;
  side.page = pages.stride_b * size;
  side.to_h = pages.stride_h * size;
  side.to_l = pages.stride_l * size;
  side.row_bytes = static_cast<int32_t>(dim * size);
  const auto bits = static_cast<uint64_t>(
      reinterpret_cast<int64_t>(side.rows) | reinterpret_cast<int64_t>(side.pages) | side.from_b |
      side.from_h | side.from_l | side.page | side.to_h | side.to_l | side.row_bytes);
  side.unit = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
  return side;
}

Work WorkOf(const AppendItem& item) {
  const Attention& a = item.attention;
  const Problem& p = a.problem;
  Work work;
  work.k = SideOf(p, a.k, item.append.k, p.dim);
  work.v = SideOf(p, a.v, item.append.v, p.dim_v);
  work.pages = a.kv_pages.pages;
  work.kv_lengths = a.kv_lengths;
  work.pages_stride = a.kv_pages.stride;
  work.len_k = p.len_k;
  work.batch = p.batch;
  work.heads = p.heads_kv;
  work.rows = item.append.rows;
  work.page_rows = static_cast<int32_t>(p.page_rows);
  return work;
}

}  // namespace

cudaError_t LaunchAppend(std::span<const AppendItem> items, cudaStream_t stream) {
  while (!items.empty()) {
    const size_t count = std::min<size_t>(items.size(), kItemsMax);
    AppendParams params = {};
    int64_t rows = 1;
    for (size_t n = 0; n < count; ++n) {
      params.items[n] = WorkOf(items[n]);
      const Work& work = params.items[n];
      rows = std::max(rows, work.batch * work.heads * work.rows);
    }
    const int64_t blocks = std::min((rows + kRowsOfBlock - 1) / kRowsOfBlock, kBlocksMax);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count), 2);
    AppendKernel<<<grid, kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    items = items.subspan(count);
  }
  return cudaSuccess;
}

cudaError_t LoadAppend() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&AppendKernel));
}

}  // namespace attend::cuda

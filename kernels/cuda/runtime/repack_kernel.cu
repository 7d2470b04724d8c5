// SPDX-License-Identifier: Apache-2.0
//
// A block copies chunks of kRowsOfChunk rows of one head; `lanes` threads share a row, each moving
// one 16-byte vector of the copy. The tensor is read in the largest unit that divides all its
// addresses.

#include "kernels/cuda/runtime/repack_kernel.h"

#include <algorithm>
#include <cstring>

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfChunk = 64;  // of one head, per block and step
constexpr int kAhead = 4;         // rows that a thread loads before its first store
constexpr int64_t kBlocksMax = 1 << 16;
constexpr int kPiecesMax = 32;  // per launch

// Strides are in bytes.
struct Work {
  const char* tensor;
  char* copy;
  int64_t stride_b, stride_h, stride_l;  // of the tensor
  const int64_t* lengths;
  int64_t chunks;  // over all heads
  int64_t rows;
  int32_t heads, chunks_of_head;
  int32_t row_bytes;  // of the tensor
  int32_t pitch;      // of the copy
  int32_t unit;       // bytes per access, which divide every address
  int32_t lanes;      // threads per row, a power of two
};

struct RepackParams {
  Work items[kPiecesMax];
};
static_assert(sizeof(RepackParams) <= 4096);  // larger parameters take longer to launch

// The thread's vectors of `rows` rows; columns that a row lacks are 0.
template <class Unit>
__device__ void CopyRows(const Work& work, const char* from, char* to, int rows) {
  constexpr int kUnits = 16 / static_cast<int>(sizeof(Unit));
  const int lane = static_cast<int>(threadIdx.x) % work.lanes;
  if (16 * lane >= work.pitch) return;
  const int step = kThreads / work.lanes;
  const int units = (work.row_bytes - 16 * lane) / static_cast<int>(sizeof(Unit));
  for (int row = static_cast<int>(threadIdx.x) / work.lanes; row < rows; row += kAhead * step) {
    Unit values[kAhead][kUnits];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const auto* const source =
          reinterpret_cast<const Unit*>(from + (row + n * step) * work.stride_l + 16 * lane);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        values[n][u] = Unit{};
        if (row + n * step < rows && u < units) values[n][u] = source[u];
      }
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (row + n * step >= rows) continue;
      uint4 vector;
      std::memcpy(&vector, values[n], sizeof(vector));
      *reinterpret_cast<uint4*>(to + int64_t{row + n * step} * work.pitch + 16 * lane) = vector;
    }
  }
}

template <class Unit>
__device__ void CopyChunk(const Work& work, int64_t chunk) {
  const int64_t head = chunk / work.chunks_of_head;
  const int64_t b = head / work.heads;
  const int64_t first = chunk % work.chunks_of_head * kRowsOfChunk;
  const int64_t length = work.lengths == nullptr ? work.rows : min(work.lengths[b], work.rows);
  const char* const from =
      work.tensor + b * work.stride_b + head % work.heads * work.stride_h + first * work.stride_l;
  char* const to = work.copy + (head * work.rows + first) * work.pitch;
  CopyRows<Unit>(work, from, to, static_cast<int>(min(length - first, int64_t{kRowsOfChunk})));
}

// blockIdx.y is the piece.
__global__ void __launch_bounds__(kThreads) RepackKernel(const __grid_constant__ RepackParams all) {
  const Work& work = all.items[blockIdx.y];
  for (int64_t chunk = blockIdx.x; chunk < work.chunks; chunk += gridDim.x) {
    switch (work.unit) {
      case 16:
        CopyChunk<uint4>(work, chunk);
        break;
      case 8:
        CopyChunk<uint2>(work, chunk);
        break;
      case 4:
        CopyChunk<uint32_t>(work, chunk);
        break;
      default:
        CopyChunk<uint16_t>(work, chunk);
    }
  }
}

Work WorkOf(const RepackPiece& piece) {
  constexpr int64_t kElementBytes = 2;
  const TensorShape& shape = piece.shape;
  Work work;
  work.tensor = static_cast<const char*>(piece.tensor.data);
  work.copy = static_cast<char*>(piece.copy);
  work.stride_b = piece.tensor.stride_b * kElementBytes;
  work.stride_h = piece.tensor.stride_h * kElementBytes;
  work.stride_l = piece.tensor.stride_l * kElementBytes;
  work.lengths = piece.lengths;
  work.rows = shape.rows;
  work.heads = static_cast<int32_t>(shape.heads);
  work.chunks_of_head = static_cast<int32_t>((shape.rows + kRowsOfChunk - 1) / kRowsOfChunk);
  work.chunks = shape.batch * shape.heads * work.chunks_of_head;
  work.row_bytes = static_cast<int32_t>(shape.columns * kElementBytes);
  work.pitch = static_cast<int32_t>(RepackedColumns(shape.columns) * kElementBytes);
  work.lanes = 1;
  while (16 * work.lanes < work.pitch) work.lanes *= 2;
  const auto bits = static_cast<uint64_t>(reinterpret_cast<int64_t>(work.tensor) | work.stride_b |
                                          work.stride_h | work.stride_l | work.row_bytes);
  work.unit = bits % 16 == 0 ? 16 : bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : 2;
  return work;
}

}  // namespace

cudaError_t LaunchRepack(std::span<const RepackPiece> pieces, cudaStream_t stream) {
  while (!pieces.empty()) {
    const size_t count = std::min<size_t>(pieces.size(), kPiecesMax);
    RepackParams params = {};
    int64_t chunks = 1;
    for (size_t n = 0; n < count; ++n) {
      params.items[n] = WorkOf(pieces[n]);
      chunks = std::max(chunks, params.items[n].chunks);
    }
    const dim3 grid(static_cast<unsigned>(std::min(chunks, kBlocksMax)),
                    static_cast<unsigned>(count));
    RepackKernel<<<grid, kThreads, 0, stream>>>(params);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    pieces = pieces.subspan(count);
  }
  return cudaSuccess;
}

cudaError_t LoadRepack() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, &RepackKernel);
}

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/copy_kernel.h"

#include <algorithm>

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // of 16 bytes, in flight for a thread
constexpr int kFewPieces = 16;
// What a block copies, beside its piece's ends. A GPU that waits 2 us for the host needs some
// 100 KiB on the way to fill a bus of 55 GB/s: seven blocks.
constexpr int64_t kBlockBytes = int64_t{kThreads} * kVectors * sizeof(uint4);

struct Piece {
  char* to;
  const char* from;
  long long bytes;
  unsigned first_block;
};

template <int kMax>
struct CopyParams {
  int count;
  Piece pieces[kMax];
};

__device__ void CopyBytes(const Piece& piece, long long begin, long long end) {
  for (long long n = begin + threadIdx.x; n < end; n += kThreads) {
    piece.to[n] = __ldcs(piece.from + n);
  }
}

// Vectors [begin, end) of the piece's middle; all loads of a thread before its first store.
__device__ void CopyVectors(uint4* to, const uint4* from, long long begin, long long end) {
  uint4 values[kVectors];
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const long long at = begin + n * kThreads + threadIdx.x;
    if (at < end) values[n] = __ldcs(from + at);
  }
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const long long at = begin + n * kThreads + threadIdx.x;
    if (at < end) __stcs(to + at, values[n]);
  }
}

// A block copies kBlockBytes of one piece, the first of a piece also its unaligned ends.
template <int kMax>
__global__ void __launch_bounds__(kThreads)
    CopyPieces(const __grid_constant__ CopyParams<kMax> params) {
  int low = 0;
  for (int high = params.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (params.pieces[middle].first_block <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const Piece piece = params.pieces[low];
  const long long block = blockIdx.x - piece.first_block;
  const auto from = reinterpret_cast<unsigned long long>(piece.from);
  const auto to = reinterpret_cast<unsigned long long>(piece.to);
  if ((from ^ to) % sizeof(uint4) != 0) {
    CopyBytes(piece, block * kBlockBytes, min((block + 1) * kBlockBytes, piece.bytes));
    return;
  }
  const long long head = min(static_cast<long long>((0 - from) % sizeof(uint4)), piece.bytes);
  const long long vectors = (piece.bytes - head) / static_cast<long long>(sizeof(uint4));
  constexpr long long kBlockVectors = kThreads * kVectors;
  CopyVectors(reinterpret_cast<uint4*>(piece.to + head),
              reinterpret_cast<const uint4*>(piece.from + head), block * kBlockVectors,
              min((block + 1) * kBlockVectors, vectors));
  if (block > 0) return;
  CopyBytes(piece, 0, head);
  CopyBytes(piece, head + vectors * static_cast<long long>(sizeof(uint4)), piece.bytes);
}

template <int kMax>
cudaError_t Launch(std::span<const CopyPiece> pieces, cudaStream_t stream) {
  CopyParams<kMax> params;
  int64_t blocks = 0;
  params.count = 0;
  for (const CopyPiece& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (piece.bytes < 0 || piece.to == nullptr || piece.from == nullptr) {
      return cudaErrorInvalidValue;
    }
    if (blocks > INT32_MAX - (piece.bytes / kBlockBytes + 1)) return cudaErrorInvalidValue;
    params.pieces[params.count++] = {piece.to, piece.from, piece.bytes,
                                     static_cast<unsigned>(blocks)};
    blocks += (piece.bytes + kBlockBytes - 1) / kBlockBytes;
  }
  if (blocks == 0) return cudaSuccess;
  CopyPieces<kMax><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchCopy(std::span<const CopyPiece> pieces, cudaStream_t stream) {
  while (!pieces.empty()) {
    const auto count = std::min<size_t>(pieces.size(), kCopyPiecesMax);
    const auto now = pieces.first(count);
    const cudaError_t error =
        count <= kFewPieces ? Launch<kFewPieces>(now, stream) : Launch<kCopyPiecesMax>(now, stream);
    if (error != cudaSuccess) return error;
    pieces = pieces.subspan(count);
  }
  return cudaSuccess;
}

cudaError_t LoadCopy() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, &CopyPieces<kFewPieces>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, &CopyPieces<kCopyPiecesMax>);
}

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Each block copies kBlockBytes of one piece, found by binary search. Stores are aligned 16-byte
// vectors; if the source is misaligned relative to them, aligned source vectors are loaded and
// shifted, with neighbours exchanged by shuffle. A thread issues all its loads before its first
// store, because only loads in flight hide the bus's latency.

#include "kernels/cuda/runtime/copy_kernel.h"

#include <algorithm>

namespace attend::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 4;  // 16-byte vectors in flight per thread
constexpr int kFewPieces = 16;
// Bytes per block, besides its piece's ends. A GPU that waits 2 us for the host needs some 100 KiB
// in flight to fill a bus of 55 GB/s: seven blocks.
constexpr int64_t kBlockBytes = int64_t{kThreads} * kVectors * sizeof(uint4);
// More would only take multiprocessors from concurrent kernels.
constexpr int64_t kBlocksMax = 64;

struct Piece {
  char* to;
  const char* from;
  long long bytes;
  unsigned first_block;
};

template <int kMax>
struct CopyParams {
  int count;
  unsigned blocks;
  Piece pieces[kMax];
};

__device__ void CopyBytes(const Piece& piece, long long begin, long long end) {
  for (long long n = begin + threadIdx.x; n < end; n += kThreads) {
    piece.to[n] = __ldcs(piece.from + n);
  }
}

// Vectors [begin, end) of the piece's middle; all of a thread's loads precede its first store.
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

// The 16 bytes that begin `shift` (1 to 15) bytes into two adjacent vectors.
__device__ uint4 Between(const uint4& low, const uint4& high, unsigned shift) {
  const unsigned bits = shift % 4 * 8;
  unsigned a = low.x, b = low.y, c = low.z, d = low.w, e = high.x;
  if (shift >= 12) {
    a = low.w, b = high.x, c = high.y, d = high.z, e = high.w;
  } else if (shift >= 8) {
    a = low.z, b = low.w, c = high.x, d = high.y, e = high.z;
  } else if (shift >= 4) {
    a = low.y, b = low.z, c = low.w, d = high.x, e = high.y;
  }
  return {__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits), __funnelshift_r(c, d, bits),
          __funnelshift_r(d, e, bits)};
}

// CopyVectors from an address that is `shift` bytes above a multiple of 16: every aligned vector is
// read once, except one in 32, and a thread gets its second half from the next lane.
__device__ void CopyShifted(uint4* to, const char* from, unsigned shift, long long begin,
                            long long end) {
  const auto* const aligned = reinterpret_cast<const uint4*>(from - shift);
  const bool last_lane = threadIdx.x % 32 == 31;
  uint4 values[kVectors];
  uint4 beyond[kVectors];  // of the last lane
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const long long at = begin + n * kThreads + threadIdx.x;
    values[n] = beyond[n] = {};
    if (at <= end) values[n] = __ldcs(aligned + at);
    if (last_lane && at < end) beyond[n] = __ldcs(aligned + at + 1);
  }
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const long long at = begin + n * kThreads + threadIdx.x;
    uint4 next = {__shfl_down_sync(~0u, values[n].x, 1), __shfl_down_sync(~0u, values[n].y, 1),
                  __shfl_down_sync(~0u, values[n].z, 1), __shfl_down_sync(~0u, values[n].w, 1)};
    if (last_lane) next = beyond[n];
    if (at < end) __stcs(to + at, Between(values[n], next, shift));
  }
}

// kBlockBytes of one piece; a piece's first block also copies the ends, where `to` is unaligned.
__device__ void CopyBlock(const Piece& piece, long long block) {
  const auto to = reinterpret_cast<unsigned long long>(piece.to);
  const long long head = min(static_cast<long long>((0 - to) % sizeof(uint4)), piece.bytes);
  const long long vectors = (piece.bytes - head) / static_cast<long long>(sizeof(uint4));
  constexpr long long kBlockVectors = kThreads * kVectors;
  const long long begin = block * kBlockVectors;
  const long long end = min(begin + kBlockVectors, vectors);
  const char* const from = piece.from + head;
  const auto shift =
      static_cast<unsigned>(reinterpret_cast<unsigned long long>(from) % sizeof(uint4));
  auto* const middle = reinterpret_cast<uint4*>(piece.to + head);
  if (shift == 0) {
    CopyVectors(middle, reinterpret_cast<const uint4*>(from), begin, end);
  } else if (begin < end) {
    CopyShifted(middle, from, shift, begin, end);
  }
  if (block > 0) return;
  CopyBytes(piece, 0, head);
  CopyBytes(piece, head + vectors * static_cast<long long>(sizeof(uint4)), piece.bytes);
}

template <int kMax>
__global__ void __launch_bounds__(kThreads)
    CopyPieces(const __grid_constant__ CopyParams<kMax> params) {
  for (unsigned block = blockIdx.x; block < params.blocks; block += gridDim.x) {
    int low = 0;
    for (int high = params.count; high - low > 1;) {
      const int middle = (low + high) / 2;
      if (params.pieces[middle].first_block <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Piece piece = params.pieces[low];
    CopyBlock(piece, block - piece.first_block);
  }
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
  params.blocks = static_cast<unsigned>(blocks);
  const auto grid = static_cast<unsigned>(std::min(blocks, kBlocksMax));
  CopyPieces<kMax><<<grid, kThreads, 0, stream>>>(params);
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

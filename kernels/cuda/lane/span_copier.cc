// SPDX-License-Identifier: Apache-2.0
//
// Small page-locked spans go into one launch of the copy kernel, because a call per span would cost
// more than the bytes; everything else goes to the copy engines. If the launch fails, its spans
// fall back to the engines, so that only those that fail there too are reported.

#include "kernels/cuda/lane/span_copier.h"

#include "kernels/cuda/lane/engine_copy.h"

namespace attend::cuda {
namespace {

bool IsMappedHostAddress(const void* address) {
  cudaPointerAttributes attributes;
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == address;
}

// cudaErrorNotSupported if CUDA has no such call. After any error, assume nothing about what was
// enqueued.
cudaError_t EnqueueBatch(const std::vector<CopyPiece>& pieces, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  for (const CopyPiece& piece : pieces) {
    to.push_back(piece.to);
    from.push_back(piece.from);
    sizes.push_back(static_cast<size_t>(piece.bytes));
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), to.size(), &attributes, &first,
                              1, stream);
#else
  (void)pieces;
  (void)stream;
  return cudaErrorNotSupported;
#endif
}

}  // namespace

bool IsMapped(const PinnedRanges& pinned, const HostSpan& span) {
  if (span.data == nullptr || span.bytes <= 0) return false;
  if (pinned.Contain(span.data, span.bytes)) return true;
  return IsMappedHostAddress(span.data) &&
         IsMappedHostAddress(static_cast<char*>(span.data) + span.bytes - 1);
}

void SpanCopier::Add(const HostSpan& span, char* device, size_t item) {
  auto* const host = static_cast<char*>(span.data);
  const bool in = kind_ == cudaMemcpyHostToDevice;
  const CopyPiece piece = {in ? device : host, in ? host : device, span.bytes};
  if (span.bytes <= tuning_.copy_kernel_bytes_max && IsMapped(pinned_, span)) {
    gathered_.push_back(piece);
    gathered_items_.push_back(item);
  } else {
    engine_.push_back(piece);
    engine_items_.push_back(item);
  }
}

void SpanCopier::AddMapped(const CopyPiece& piece, size_t item) {
  gathered_.push_back(piece);
  gathered_items_.push_back(item);
}

bool SpanCopier::EnqueueTogether(cudaStream_t stream) {
  if (!tuning_.batch_copies || engine_.size() < 2) return false;
  const cudaError_t error = EnqueueBatch(engine_, stream);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaSuccess;
}

void SpanCopier::Enqueue(cudaStream_t stream, const Fail& fail) {
  if (LaunchCopy(gathered_, stream) != cudaSuccess) {
    (void)cudaGetLastError();
    engine_.insert(engine_.end(), gathered_.begin(), gathered_.end());
    engine_items_.insert(engine_items_.end(), gathered_items_.begin(), gathered_items_.end());
  }
  if (EnqueueTogether(stream)) return;
  for (size_t n = 0; n < engine_.size(); ++n) {
    const CopyPiece& piece = engine_[n];
    const cudaError_t error = EnqueueCopy({piece.to, piece.from, piece.bytes, 1, 0}, kind_, stream);
    if (error != cudaSuccess) fail(engine_items_[n], error);
  }
}

}  // namespace attend::cuda

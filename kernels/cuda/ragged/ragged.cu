// SPDX-License-Identifier: Apache-2.0
//
// A launch of a list uploads attentions, tensor maps and groups in one copy; a one-block kernel
// then reads the true lengths, sorts the groups by cost and numbers their tiles, because only the
// device knows the lengths. A single attention whose lengths the host knows travels in the kernel's
// parameter and needs neither.

#include "kernels/cuda/ragged/ragged.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/ragged/launch_options.h"
#include "kernels/cuda/ragged/tile_queue.cuh"
#include "kernels/cuda/runtime/copy_kernel.h"

namespace attend::cuda {
namespace {

constexpr int kSortThreads = 512;
constexpr int kBuckets = 256;

bool TravelsInParameter(std::span<const Attention* const> attentions) {
  if (attentions.size() != 1) return false;
  const Attention& a = *attentions.front();
  return !a.problem.packed && a.q_lengths == nullptr && a.kv_lengths == nullptr;
}

// Cost of a group's longest tile, in keys.
ATTEND_HD inline int64_t Cost(const Problem& p, int64_t k_len, int rows) {
  if (p.mask.left < 0 || p.mask.right < 0) return k_len;
  const int64_t width = p.mask.left / 2 + p.mask.right / 2;  // halves cannot overflow
  return width >= k_len ? k_len : min(k_len, 2 * width + rows);
}

__device__ int64_t GroupCost(const Attention* attentions, const TileGroup& group, int rows) {
  const Attention& a = attentions[group.problem];
  return max(Cost(a.problem, SequenceOf(a, group.b).k_len, rows), int64_t{0});
}

// Reads the true lengths, orders the groups longest first (a bucket sort into 256 cost classes; the
// order within a class is unspecified) and numbers their tiles.
__global__ void __launch_bounds__(kSortThreads)
    OrderGroups(const Attention* attentions, const TileGroup* groups, int count, int rows,
                TileGroup* ordered) {
  __shared__ unsigned long long most;
  __shared__ int begin[kBuckets];
  __shared__ int tiles[kSortThreads];
  const int thread = threadIdx.x;
  if (thread == 0) most = 1;
  if (thread < kBuckets) begin[thread] = 0;
  __syncthreads();
  for (int g = thread; g < count; g += kSortThreads) {
    const int64_t cost = GroupCost(attentions, groups[g], rows);
    atomicMax(&most, static_cast<unsigned long long>(cost));
  }
  __syncthreads();
  const double scale = static_cast<double>(kBuckets - 1) / static_cast<double>(most);
  const auto bucket_of = [&](int g) {
    const int64_t cost = GroupCost(attentions, groups[g], rows);
    return kBuckets - 1 - static_cast<int>(static_cast<double>(cost) * scale);
  };
  for (int g = thread; g < count; g += kSortThreads) atomicAdd(&begin[bucket_of(g)], 1);
  __syncthreads();
  if (thread == 0) {
    for (int n = 0, sum = 0; n < kBuckets; ++n) {
      const int size = begin[n];
      begin[n] = sum;
      sum += size;
    }
  }
  __syncthreads();
  for (int g = thread; g < count; g += kSortThreads) {
    TileGroup group = groups[g];
    const Attention& a = attentions[group.problem];
    const Sequence s = SequenceOf(a, group.b);
    OrderTiles(a.problem, s.q_rows, s.k_len, rows, group);
    ordered[atomicAdd(&begin[bucket_of(g)], 1)] = group;
  }
  __syncthreads();
  int before = 0;
  for (int base = 0; base < count; base += kSortThreads) {
    const int g = base + thread;
    tiles[thread] = g < count ? ordered[g].heads * ordered[g].row_tiles : 0;
    __syncthreads();
    for (int step = 1; step < kSortThreads; step *= 2) {
      const int left = thread >= step ? tiles[thread - step] : 0;
      __syncthreads();
      tiles[thread] += left;
      __syncthreads();
    }
    if (g < count) {
      ordered[g].first_tile = before + tiles[thread] - ordered[g].heads * ordered[g].row_tiles;
    }
    before += tiles[kSortThreads - 1];
    __syncthreads();
  }
  if (thread == 0) ordered[count].first_tile = before;
}

int64_t RoundUp(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Offsets in the workspace; everything but `ordered` is copied from the host in one piece.
struct Layout {
  int64_t attentions, maps, groups, ordered, bytes;

  Layout(int64_t problems, int64_t group_count) {
    attentions = kTileQueueBytes;
    maps = attentions + RoundUp(problems * static_cast<int64_t>(sizeof(Attention)));
    groups = maps + RoundUp(problems * static_cast<int64_t>(sizeof(TensorMaps)));
    ordered = groups + RoundUp(group_count * static_cast<int64_t>(sizeof(TileGroup)));
    bytes = ordered + RoundUp((group_count + 1) * static_cast<int64_t>(sizeof(TileGroup)));
  }
};

// Sequences whose lengths only the device knows get a group each.
void AddGroups(const Attention& a, int problem, std::vector<TileGroup>* groups) {
  const bool apart = a.problem.packed || a.q_lengths != nullptr || a.kv_lengths != nullptr;
  TileGroup group;
  group.problem = problem;
  group.heads = static_cast<int32_t>(a.problem.heads_q * (apart ? 1 : a.problem.batch));
  for (int64_t b = 0; b < (apart ? a.problem.batch : std::min<int64_t>(a.problem.batch, 1)); ++b) {
    group.b = static_cast<int32_t>(b);
    groups->push_back(group);
  }
}

// limits.h keeps this far below 2^63.
int64_t TilesAtMost(const Problem& p, int rows) {
  if (p.packed) return (p.total_q / rows + std::min(p.batch, p.total_q)) * p.heads_q;
  return (p.len_q + rows - 1) / rows * p.heads_q * p.batch;
}

cudaError_t Maps(const FlashVariant& variant, const Attention& a, TensorMaps* maps) {
  if (!variant.tensor_maps) return cudaSuccess;
  return EncodeTensorMaps(a, variant.boxes, maps);
}

// Builds the list in host memory, up to `ordered`.
cudaError_t FillList(const FlashVariant& variant, std::span<const Attention* const> attentions,
                     const std::vector<TileGroup>& groups, const Layout& layout, char* host) {
  const auto at = [&](int64_t offset) { return host + (offset - layout.attentions); };
  for (size_t n = 0; n < attentions.size(); ++n) {
    TensorMaps maps;
    const cudaError_t error = Maps(variant, *attentions[n], &maps);
    if (error != cudaSuccess) return error;
    std::memcpy(at(layout.attentions) + n * sizeof(Attention), attentions[n], sizeof(Attention));
    std::memcpy(at(layout.maps) + n * sizeof(TensorMaps), &maps, sizeof(TensorMaps));
  }
  std::memcpy(at(layout.groups), groups.data(), groups.size() * sizeof(TileGroup));
  return cudaSuccess;
}

cudaError_t UploadList(const FlashVariant& variant, std::span<const Attention* const> attentions,
                       char* workspace, HostArena* lists, cudaStream_t stream,
                       RaggedParams* params) {
  // A graph would repeat the copy at every launch, from host memory that no longer exists.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t asked = cudaStreamIsCapturing(stream, &capture);
  if (asked != cudaSuccess) return asked;
  if (capture != cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnsupported;
  std::vector<TileGroup> groups;
  for (size_t n = 0; n < attentions.size(); ++n) {
    AddGroups(*attentions[n], static_cast<int>(n), &groups);
  }
  const Layout layout(static_cast<int64_t>(attentions.size()), static_cast<int64_t>(groups.size()));
  const int64_t bytes = layout.ordered - layout.attentions;
  char* const locked = lists == nullptr ? nullptr : lists->Take(bytes);
  // A copy from pageable memory has staged the bytes when the call returns.
  std::vector<char> pageable(locked == nullptr ? static_cast<size_t>(bytes) : 0);
  char* const host = locked == nullptr ? pageable.data() : locked;
  cudaError_t error = FillList(variant, attentions, groups, layout, host);
  if (error != cudaSuccess) return error;
  char* const list = workspace + layout.attentions;
  if (locked == nullptr) {
    error = cudaMemcpyAsync(list, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream);
  } else {  // by a kernel: on the copy engine a list would queue behind large tensors
    const CopyPiece piece{list, host, bytes};
    error = LaunchCopy({&piece, 1}, stream);
  }
  if (error != cudaSuccess) return error;
  params->single.problem.page_rows = attentions.front()->problem.page_rows;
  params->attentions = reinterpret_cast<const Attention*>(workspace + layout.attentions);
  params->maps = reinterpret_cast<const TensorMaps*>(workspace + layout.maps);
  params->groups = reinterpret_cast<const TileGroup*>(workspace + layout.ordered);
  params->group_count = static_cast<int32_t>(groups.size());
  OrderGroups<<<1, kSortThreads, 0, stream>>>(
      params->attentions, reinterpret_cast<const TileGroup*>(workspace + layout.groups),
      params->group_count, variant.rows, reinterpret_cast<TileGroup*>(workspace + layout.ordered));
  return cudaGetLastError();
}

cudaError_t PutSingle(const FlashVariant& variant, const Attention& a, RaggedParams* params) {
  params->single = a;
  TileGroup& group = params->single_group[0];
  group.heads = static_cast<int32_t>(a.problem.batch * a.problem.heads_q);
  OrderTiles(a.problem, a.problem.len_q, a.problem.len_k, variant.rows, group);
  params->single_group[1].first_tile = group.heads * group.row_tiles;
  return Maps(variant, a, &params->single_maps);
}

cudaError_t PrepareKernel(const FlashVariant& variant, int* multiprocessors) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               variant.shared_bytes);
  if (error != cudaSuccess) return error;
  // These kernels do not use the L1 cache; by default the driver may leave shared memory for one
  // block only.
  return cudaFuncSetAttribute(variant.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// Early start only outside of graphs, whose edges order the nodes.
cudaError_t Launch(const FlashVariant& variant, unsigned blocks, RaggedParams params,
                   bool may_begin_early, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t asked = cudaStreamIsCapturing(stream, &capture);
  if (asked != cudaSuccess) return asked;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(variant.threads));
  config.dynamicSmemBytes = static_cast<size_t>(variant.shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  const bool begins_early = may_begin_early && variant.begins_early;
  config.numAttrs = begins_early && capture == cudaStreamCaptureStatusNone ? 1 : 0;
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&config, variant.kernel, arguments);
}

}  // namespace

Result<int64_t> RaggedWorkspaceBytes(std::span<const Problem* const> problems) {
  int64_t sequences = 0;
  int64_t tiles = 0;
  for (const Problem* problem : problems) {
    tiles += TilesAtMost(*problem, kTileRowsMin);
    if (tiles > kLaunchTilesMax) {
      return InvalidArgument("query rows of the launch make " + std::to_string(tiles) +
                             " tiles of " + std::to_string(kTileRowsMin) + ", must be at most " +
                             std::to_string(kLaunchTilesMax));
    }
    if (__builtin_add_overflow(sequences, problem->batch, &sequences)) {
      return InvalidArgument("sequences of the launch overflow 64 bits");
    }
  }
  const int64_t each = sizeof(Attention) + sizeof(TensorMaps) + 2 * sizeof(TileGroup);
  ATTEND_RETURN_IF_ERROR(CheckedProduct("bytes of workspace", sequences + 16, 4 * each).status());
  return Layout(static_cast<int64_t>(problems.size()), sequences).bytes;
}

cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream) {
  int64_t tiles = 0;
  for (const Attention* attention : attentions) {
    tiles += TilesAtMost(attention->problem, variant.rows);
  }
  if (tiles == 0) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t error = PrepareKernel(variant, &multiprocessors);
  if (error != cudaSuccess) return error;
  multiprocessors = std::max(multiprocessors - options.multiprocessors_free, 1);
  RaggedParams params;
  params.queue = static_cast<TileQueue*>(workspace);
  error = TravelsInParameter(attentions)
              ? PutSingle(variant, *attentions.front(), &params)
              : UploadList(variant, attentions, static_cast<char*>(workspace), options.lists,
                           stream, &params);
  if (error != cudaSuccess) return error;
  const auto blocks =
      static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors * variant.blocks));
  return Launch(variant, blocks, params, options.may_begin_early, stream);
}

cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, cudaStream_t stream) {
  return LaunchRagged(variant, attentions, workspace, LaunchOptions{}, stream);
}

cudaError_t LoadRagged() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, &OrderGroups);
}

cudaError_t LoadVariants(std::span<const FlashVariant> variants) {
  for (const FlashVariant& variant : variants) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, variant.kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace attend::cuda

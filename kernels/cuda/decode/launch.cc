// SPDX-License-Identifier: Apache-2.0
//
// Host side of a decoding launch: variants, workspace, lists. Any thread.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/cuda/decode/decode.h"
#include "kernels/cuda/decode/instances.h"
#include "kernels/cuda/runtime/copy_kernel.h"

namespace attend::cuda {
namespace {

constexpr int kDims[] = {64, 128, 256};            // compiled head dims
constexpr int kRowTiles[] = {8, 16, 32, 64, 128};  // rows of a unit, at most

int64_t RoundUp(int64_t bytes) { return CeilDivide(bytes, 256) * 256; }

int64_t RowsOf(const Problem& p) { return p.heads_kv == 0 ? 0 : p.len_q * p.group(); }

// Upper bounds of the partials of a group and of a unit.
struct PartialCounts {
  int64_t splits = 1;
  int64_t groups = 0;
  int64_t splits_all = 0;  // over all units; capped at what all blocks need
  int64_t blocks = 0;      // upper bound
  int64_t rows = 1;

  void Add(const Problem& p, const FlashVariant& variant) {
    const int64_t tile_rows = variant.rows;  // upper bound of a unit's rows
    const int64_t rows_max = std::min(RowsOf(p), tile_rows);
    const int64_t row_tiles = CeilDivide(RowsOf(p), tile_rows);
    // A packed sequence may have fewer rows than the longest, and therefore shorter splits.
    const int64_t most = SplitsAtMost(p.len_k, p.packed ? 1 : rows_max);
    const int64_t units = p.batch * p.heads_kv * row_tiles;
    const int64_t room = std::min(kBlocksMax, kMultiprocessorsMax * variant.blocks);
    blocks = std::max(blocks, std::min(room, splits_all += std::min(room, units) * most));
    splits = std::max(splits, std::min<int64_t>(kFanIn, most));
    if (most > kFanIn) groups = std::max(groups, CeilDivide(most, kFanIn));
    rows = std::max(rows, rows_max);
  }
  int64_t partials() const { return 2 * blocks * (splits + groups); }
  int64_t floats(int64_t columns) const { return CeilDivide(2 * rows, 4) * 4 + rows * columns; }
};

// Offsets in the workspace.
struct Layout {
  int64_t attentions, sequences, partials;

  Layout(int64_t problems, int64_t sequence_count) {
    attentions = kTileQueueBytes;
    sequences = attentions + RoundUp(problems * static_cast<int64_t>(sizeof(Attention)));
    partials = sequences + RoundUp(sequence_count * static_cast<int64_t>(sizeof(SequenceId)));
  }
};

cudaError_t UploadList(std::span<const Attention* const> attentions, const Layout& layout,
                       char* workspace, HostArena* lists, cudaStream_t stream,
                       DecodeParams* params) {
  // A graph would repeat the copy at every launch, from host memory that no longer exists.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t asked = cudaStreamIsCapturing(stream, &capture);
  if (asked != cudaSuccess) return asked;
  if (capture != cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnsupported;
  const int64_t bytes = layout.partials - layout.attentions;
  char* const locked = lists == nullptr ? nullptr : lists->Take(bytes);
  // A copy from pageable memory has staged the bytes when the call returns.
  std::vector<char> pageable(locked == nullptr ? static_cast<size_t>(bytes) : 0);
  char* const host = locked == nullptr ? pageable.data() : locked;
  int32_t count = 0;
  for (size_t n = 0; n < attentions.size(); ++n) {
    std::memcpy(host + n * sizeof(Attention), attentions[n], sizeof(Attention));
    SequenceId id{static_cast<int32_t>(n), 0};
    for (; id.b < attentions[n]->problem.batch; ++id.b, ++count) {
      std::memcpy(host + (layout.sequences - layout.attentions) + count * sizeof(id), &id,
                  sizeof(id));
    }
  }
  params->attentions = reinterpret_cast<const Attention*>(workspace + layout.attentions);
  params->sequences = reinterpret_cast<const SequenceId*>(workspace + layout.sequences);
  params->sequence_count = count;
  char* const list = workspace + layout.attentions;
  if (locked == nullptr) {
    return cudaMemcpyAsync(list, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream);
  }
  const CopyPiece piece{list, host, bytes};
  return LaunchCopy({&piece, 1}, stream);
}

void PutSingle(const Attention& a, DecodeParams* params) {
  params->single = a;
  params->sequence_count = static_cast<int32_t>(a.problem.batch);
  params->alike = !a.problem.packed && a.q_lengths == nullptr && a.kv_lengths == nullptr;
}

// Precomputes on the host what is the same for all sequences.
void PlanAlike(int tile_rows, DecodeParams* params) {
  const SequencePlan& plan = params->plan;
  params->alike = params->shares.total < (int64_t{1} << 31);
  if (!params->alike) return;
  DescribeSequence(params->single, plan, params->segment);
  SetRowsAndKeys(params->single.problem.mask, 0, tile_rows, params->segment);
  params->by_unit_cost = Divisor(static_cast<uint32_t>(plan.unit_cost()));
  params->by_split_cost = Divisor(static_cast<uint32_t>(plan.split_cost));
  params->by_units = Divisor(static_cast<uint32_t>(plan.units));
  params->by_row_tiles = Divisor(static_cast<uint32_t>(plan.row_tiles));
}

// Percentage of the unified memory to use as shared memory; loads straight to registers need the
// rest as L1.
int Carveout(const FlashVariant& variant) {
  constexpr int kLeast = 100 << 10;  // of any multiprocessor that runs all variants
  const int needed = variant.blocks * (variant.shared_bytes + (8 << 10));
  return needed >= kLeast ? cudaSharedmemCarveoutMaxShared : needed * 100 / kLeast;
}

cudaError_t Prepare(const FlashVariant& variant, int* multiprocessors) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 variant.shared_bytes);
  }
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(variant.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              Carveout(variant));
}

}  // namespace

std::span<const FlashVariant> DecodeVariantsFor(KernelId kernel, const Problem& p) {
  const bool hopper = kernel == KernelId::kCudaDecodeSm90;
  const int64_t most = std::max(p.dim, p.dim_v);
  const int dim = *std::lower_bound(std::begin(kDims), std::end(kDims) - 1, most);
  const int rows = *std::lower_bound(std::begin(kRowTiles), std::end(kRowTiles) - 1, RowsOf(p));
  switch (p.dtype) {
    case DType::kFloat16:
      return hopper ? decode::HopperFloat16(dim, rows) : decode::Float16(dim, rows);
    case DType::kBFloat16:
      return hopper ? decode::HopperBFloat16(dim, rows) : decode::BFloat16(dim, rows);
    default:
      return {};
  }
}

Result<int64_t> DecodeWorkspaceBytes(std::span<const Problem* const> problems) {
  // One launch per variant, sized as if that variant took everything it can.
  struct Launch {
    const FlashVariant* variant;
    PartialCounts counts;
  };
  std::vector<Launch> launches;
  int64_t sequences = 0;
  for (const Problem* p : problems) {
    if (__builtin_add_overflow(sequences, p->batch, &sequences) || sequences > kLaunchTilesMax) {
      return InvalidArgument("sequences of the launch are more than " +
                             std::to_string(kLaunchTilesMax));
    }
    for (const KernelId kernel : {KernelId::kCudaDecodeSm80, KernelId::kCudaDecodeSm90}) {
      for (const FlashVariant& variant : DecodeVariantsFor(kernel, *p)) {
        auto launch = std::find_if(launches.begin(), launches.end(), [&](const Launch& each) {
          return each.variant->kernel == variant.kernel;
        });
        if (launch == launches.end()) launch = launches.insert(launch, {&variant, {}});
        launch->counts.Add(*p, variant);
      }
    }
  }
  const Layout layout(static_cast<int64_t>(problems.size()), sequences);
  int64_t floats = 0;
  for (const auto& [variant, counts] : launches) {
    floats = std::max(floats, counts.partials() * counts.floats(variant->columns));
  }
  return layout.partials + RoundUp(floats * static_cast<int64_t>(sizeof(float)));
}

cudaError_t LaunchDecode(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream) {
  PartialCounts counts;
  int64_t sequences = 0;
  for (const Attention* a : attentions) {
    if (RowsOf(a->problem) == 0) continue;
    counts.Add(a->problem, variant);
    sequences += a->problem.batch;
  }
  if (counts.blocks == 0) return cudaSuccess;
  int multiprocessors = 0;
  cudaError_t error = Prepare(variant, &multiprocessors);
  if (error != cudaSuccess) return error;
  multiprocessors =
      std::clamp(multiprocessors - options.multiprocessors_free, 1, kMultiprocessorsMax);
  DecodeParams params;
  auto* const base = static_cast<char*>(workspace);
  int64_t partials = kTileQueueBytes;
  if (attentions.size() == 1) {
    PutSingle(*attentions.front(), &params);
  } else {
    for (const Attention* a : attentions) {
      if (RowsOf(a->problem) == 0) sequences += a->problem.batch;
    }
    const Layout layout(static_cast<int64_t>(attentions.size()), sequences);
    error = UploadList(attentions, layout, base, options.lists, stream, &params);
    if (error != cudaSuccess) return error;
    partials = layout.partials;
  }
  params.counters = reinterpret_cast<DecodeCounters*>(base + sizeof(TileQueue));
  params.partials = reinterpret_cast<float*>(base + partials);
  params.partial_floats = counts.floats(variant.columns);
  params.partial_rows = static_cast<int32_t>(counts.rows);
  params.split_partials = static_cast<int32_t>(counts.splits);
  params.group_partials = static_cast<int32_t>(counts.groups);
  const auto blocks =
      static_cast<int>(std::min<int64_t>(counts.blocks, int64_t{multiprocessors} * variant.blocks));
  if (params.alike) {
    params.plan = PlanSequence(params.single, 0, variant.rows);
    const int64_t total = params.single.problem.batch * params.plan.cost();
    params.shares = params.plan.row_tiles > 1 ? AlignShares(total, params.plan.unit_cost(), blocks)
                                              : CutShares(total, blocks);
    PlanAlike(variant.rows, &params);
  }
  void* arguments[] = {&params};
  return cudaLaunchKernel(variant.kernel, dim3(static_cast<unsigned>(blocks)),
                          dim3(static_cast<unsigned>(variant.threads)), arguments,
                          static_cast<size_t>(variant.shared_bytes), stream);
}

cudaError_t LoadDecode(KernelId kernel) {
  Problem p;
  p.batch = p.heads_q = p.heads_kv = 1;
  for (const int dim : kDims) {
    for (const int rows : kRowTiles) {
      p.dim = p.dim_v = dim;
      p.len_q = rows;
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        p.dtype = dtype;
        const cudaError_t error = LoadVariants(DecodeVariantsFor(kernel, p));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace attend::cuda

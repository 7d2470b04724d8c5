// SPDX-License-Identifier: Apache-2.0
//
// The decoding launch: few query rows against long K and V, dense or paged. One launch computes a
// list of attentions of any shapes; plan.h says how their keys are split and distributed. Lengths
// and page tables are read on the device, so that a launch of one attention can be captured in a
// graph and replayed after they have grown (up to the problem's len_k).

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/decode/plan.h"
#include "kernels/cuda/ragged/launch_options.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/util/status.h"

namespace attend::cuda {

// One sequence of a list.
struct SequenceId {
  int32_t problem = 0;  // index of the attention
  int32_t b = 0;
};

// Upper bound of multiprocessors that a launch uses; a larger GPU's others stay idle. Workspace is
// sized for it on every GPU (README.md).
inline constexpr int kMultiprocessorsMax = 148;
inline constexpr int kBlocksMax = 4 * kMultiprocessorsMax;

// Completed splits of a group, and completed groups of a unit: zero between launches. One pair per
// share, whose last unit and last group may continue in other shares.
struct DecodeCounters {
  unsigned int groups[kBlocksMax];
  unsigned int splits[kBlocksMax];
};
static_assert(sizeof(TileQueue) + sizeof(DecodeCounters) <= kTileQueueBytes);

// Kernel parameter. A single attention is passed by value; a list is read from the workspace.
struct DecodeParams {
  Attention single;
  const Attention* attentions = nullptr;  // null: `single`
  const SequenceId* sequences = nullptr;  // null: those of `single`
  int32_t sequence_count = 0;
  // If all sequences have the same lengths, the host plans: `plan` and `segment` (without the
  // per-unit fields) apply to all. Costs are then below 2^31.
  bool alike = false;
  SequencePlan plan;
  Segment segment;
  Divisor by_unit_cost, by_split_cost, by_units, by_row_tiles;
  Shares shares;
  DecodeCounters* counters = nullptr;
  // Partials of groups' splits and of units' groups: first, per block, those that are entirely its
  // own; then, per share, those of runs that begin in it and continue in others.
  float* partials = nullptr;
  int64_t partial_floats = 0;
  int32_t partial_rows = 0;
  int32_t split_partials = 0;  // per group
  int32_t group_partials = 0;  // per unit
};

// The compiled variants of cuda_decode_sm80 or cuda_decode_sm90, best first; empty unless the dtype
// is fp16 or bf16.
std::span<const FlashVariant> DecodeVariantsFor(KernelId kernel, const Problem& problem);

// Workspace bytes for a launch of these attentions by either kernel, including kTileQueueBytes.
Result<int64_t> DecodeWorkspaceBytes(std::span<const Problem* const> problems);

// As LaunchRagged.
cudaError_t LaunchDecode(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream);

// Loads the kernel's code on the current device.
cudaError_t LoadDecode(KernelId kernel);

}  // namespace attend::cuda

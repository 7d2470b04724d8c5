// SPDX-License-Identifier: Apache-2.0
//
// The decoding launch: few query rows against long K and V, dense or in pages. One launch computes
// a list of attentions of any shapes; plan.h says how their keys are cut and shared out. Lengths
// and page tables are read on the device, so that a launch of one attention may be captured in a
// graph and run again when they have grown (up to the problem's len_k).

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

// Multiprocessors that a launch fills; a GPU's others stay idle. Workspace is for as many, whatever
// the GPU (README.md).
inline constexpr int kMultiprocessorsMax = 148;
inline constexpr int kBlocksMax = 4 * kMultiprocessorsMax;

// How many splits of a group, and groups of a unit, have been computed: zero between launches. One
// for each share, whose last unit and whose last group may go on in others.
struct DecodeCounters {
  unsigned int groups[kBlocksMax];
  unsigned int splits[kBlocksMax];
};
static_assert(sizeof(TileQueue) + sizeof(DecodeCounters) <= kTileQueueBytes);

// The kernel's parameter. A single attention travels in it; a list is read from the workspace.
struct DecodeParams {
  Attention single;
  const Attention* attentions = nullptr;  // null: `single`
  const SequenceId* sequences = nullptr;  // null: those of `single`
  int32_t sequence_count = 0;
  // If all sequences are as long as the first, the host plans: `plan` is theirs, and `segment`,
  // but for what is a unit's own. Costs are below 2^31 then.
  bool alike = false;
  SequencePlan plan;
  Segment segment;
  Divisor by_unit_cost, by_split_cost, by_units, by_row_tiles;
  Shares shares;
  DecodeCounters* counters = nullptr;
  // Partials of a group's splits and of a unit's groups: for each block those that are all its own,
  // then for each share those of runs that begin in it and go on in others.
  float* partials = nullptr;
  int64_t partial_floats = 0;
  int32_t partial_rows = 0;
  int32_t split_partials = 0;  // of a group
  int32_t group_partials = 0;  // of a unit
};

// The compiled variants of cuda_decode_sm80 or cuda_decode_sm90, best first; empty for problems of
// other dtypes than fp16 and bf16.
std::span<const FlashVariant> DecodeVariantsFor(KernelId kernel, const Problem& problem);

// Bytes of workspace for a launch of these attentions by either kernel, kTileQueueBytes included.
Result<int64_t> DecodeWorkspaceBytes(std::span<const Problem* const> problems);

// As LaunchRagged.
cudaError_t LaunchDecode(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream);

// Brings the kernel's code to the current device.
cudaError_t LoadDecode(KernelId kernel);

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// How a launch is started beside what it computes. No bit of an answer depends on any of it.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/runtime/host_arena.h"

namespace attend::cuda {

struct LaunchOptions {
  // Page-locked memory for lists of attentions, theirs until the launches have run. Null, or too
  // little left: lists are copied from pageable memory.
  HostArena* lists = nullptr;
  // Multiprocessors that the blocks of one launch do not fill, for launches beside it. One is left
  // in any case.
  int multiprocessors_free = 0;
  // Kernels that can may begin before what stands before them on the stream has ended; they wait
  // for it by themselves. For streams without waits for events of other streams.
  bool may_begin_early = true;
};

// As in ragged.h, which has it without options.
cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream);

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// Options of how a launch is started. No bit of a result depends on them.

#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "kernels/contract/problem.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/runtime/host_arena.h"

namespace attend::cuda {

struct LaunchOptions {
  // Page-locked memory for lists of attentions, in use until the launches have run. If null or
  // exhausted, lists are copied from pageable memory.
  HostArena* lists = nullptr;
  // Multiprocessors that the blocks of one launch leave free for concurrent launches. At least one
  // is used in any case.
  int multiprocessors_free = 0;
  // Kernels that support it may start before earlier work on the stream has ended; they wait for it
  // themselves. Only for streams that do not wait for other streams' events.
  bool may_begin_early = true;
};

// As in ragged.h, with options.
cudaError_t LaunchRagged(const FlashVariant& variant, std::span<const Attention* const> attentions,
                         void* workspace, const LaunchOptions& options, cudaStream_t stream);

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The numbers by which a lane decides how to copy and cut its items, all in one place.
// tests/bench/bench_lane.cc compared alternatives on an NVIDIA H200. None depends on load.

#pragma once

#include <cstdint>

namespace attend::cuda {

// Page-locked spans up to this size are gathered and scattered by a kernel, all of a batch in one
// launch. Larger spans are copied by the copy engines, which do not use the multiprocessors.
inline constexpr int64_t kCopyKernelBytesMax = int64_t{256} << 10;

// The largest single copy on a copy engine, so that others wait for it at most 0.3 ms.
inline constexpr int64_t kEngineCopyBytesMax = int64_t{16} << 20;

// When an attention is cut into parts (cut_plan.h).
struct CutBounds {
  int parts_min = 1;   // more only for tests and benchmarks
  int parts_max = 16;  // unless launch_seconds_max needs more
  // Input and output bytes of an item and of a part: below these a part costs more than it gains.
  int64_t item_bytes_min = int64_t{24} << 20;
  int64_t part_bytes_min = int64_t{4} << 20;
  double launch_seconds_max = 0.65e-3;  // of one part's kernel, as estimated
  // The same if nothing is copied. Fewer launches, because after the last launch of an attention
  // the device has less to do until its client sends the next.
  double in_place_seconds_max = 1e-3;
  double bus_bytes_per_second = 50e9;  // either way
  double seconds_per_part = 10e-6;     // what a part costs besides its bytes and FLOPs
};

struct LaneTuning {
  int64_t copy_kernel_bytes_max = kCopyKernelBytesMax;
  bool batch_copies = false;     // one CUDA call for all of a batch's engine copies
  int multiprocessors_free = 0;  // that parts of large attentions leave free
  CutBounds cut;
};

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// A named time range on this thread for a profiler: an NVTX range, which Nsight Systems shows
// beside the streams. Next to free without a profiler and in builds without CUDA.

#pragma once

namespace attend {

class TraceRange {
 public:
  explicit TraceRange(const char* name);  // a string literal
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

}  // namespace attend

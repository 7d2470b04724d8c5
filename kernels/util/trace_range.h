// SPDX-License-Identifier: Apache-2.0
//
// A named stretch of time on this thread for a profiler: an NVTX range, shown by Nsight Systems
// beside the streams. Without a profiler, and in builds without CUDA, it costs next to nothing.

#pragma once

namespace attend {

class TraceRange {
 public:
  explicit TraceRange(const char* name);  // a literal
  ~TraceRange();
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;
};

}  // namespace attend

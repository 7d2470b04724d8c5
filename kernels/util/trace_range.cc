// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/trace_range.h"

#if defined(ATTEND_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

namespace attend {

#if defined(ATTEND_NVTX)
// A library of its own would be one more to bring along: the header looks for a profiler itself.
TraceRange::TraceRange(const char* name) { nvtxRangePushA(name); }
TraceRange::~TraceRange() { nvtxRangePop(); }
#else
TraceRange::TraceRange(const char*) {}
TraceRange::~TraceRange() {}
#endif

}  // namespace attend

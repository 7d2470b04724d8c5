// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/trace_range.h"

#if defined(ATTEND_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

namespace attend {

#if defined(ATTEND_NVTX)
// NVTX 3 is header-only and loads a profiler's library itself: nothing to link or to ship.
TraceRange::TraceRange(const char* name) { nvtxRangePushA(name); }
TraceRange::~TraceRange() { nvtxRangePop(); }
#else
TraceRange::TraceRange(const char*) {}
TraceRange::~TraceRange() {}
#endif

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Turns exceptions of the CPU kernels into errors, so that none leaves the library.

#pragma once

#include <exception>
#include <new>
#include <string>

#include "kernels/util/status.h"

namespace attend {

// Runs `work`, which may throw. RESOURCE_EXHAUSTED for std::bad_alloc, INTERNAL for all else.
template <class Work>
Status Guarded(const Work& work) {
  try {
    work();
    return Status();
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory");  // short enough to take none
  } catch (const std::exception& error) {
    return Internal(std::string("CPU kernel failed: ") + error.what());
  } catch (...) {
    return Internal("CPU kernel failed with an unknown exception");
  }
}

}  // namespace attend

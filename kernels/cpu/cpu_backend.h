// SPDX-License-Identifier: Apache-2.0
//
// The CPU as a Backend. All lanes share one thread pool: busy lanes divide the cores among them,
// and a single busy lane gets all.

#pragma once

#include <memory>

#include "kernels/contract/backend.h"

namespace attend {

std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options);

}  // namespace attend

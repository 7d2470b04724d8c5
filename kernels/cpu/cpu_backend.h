// SPDX-License-Identifier: Apache-2.0
//
// The CPU as a Backend. A lane is a share of one pool of threads: lanes that have work divide the
// cores between them, a lone one gets them all.

#pragma once

#include <memory>

#include "kernels/contract/backend.h"

namespace attend {

std::unique_ptr<Backend> MakeCpuBackend(const BackendOptions& options);

}  // namespace attend

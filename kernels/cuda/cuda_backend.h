// SPDX-License-Identifier: Apache-2.0
//
// One NVIDIA GPU as a Backend: page-locked host memory, streams as lanes.

#pragma once

#include <memory>

#include "kernels/contract/backend.h"

namespace attend {

// NOT_FOUND if there is no such GPU, INTERNAL with CUDA's message if it cannot be used.
Result<std::unique_ptr<Backend>> MakeCudaBackend(int index, const BackendOptions& options);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Converts settings to the options of the Open Inference Protocol's service.

#pragma once

#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/app/config.h"
#include "server/oip/inference_service.h"
#include "server/regions/region_registry.h"

namespace attend {

// `lent` holds GPU memory, for the GPUs of `backends`; null: shared memory is off.
// INVALID_ARGUMENT: no such user.
Result<oip::InferenceServiceImpl::Options> MakeOipOptions(const Config& config,
                                                          const std::vector<Backend*>& backends,
                                                          RegionRegistry* lent);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The rules of a request's tree: the mask of a draft (kernels/contract/tree.h). Pure.

#pragma once

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/sessions/cache_hold.h"
#include "server/wire/validate.h"
#include "server/wire/wire_arrays.h"

namespace attend {

// Called last, except for the backward pass, once the problem and its lengths are known to be
// valid. Sets the tree and the bias that it is written out as. INVALID_ARGUMENT.
Status ValidateTree(const v1::AttendRequest& request, const WireArrays& arrays,
                    const CacheHold* cache, Validated& out);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The rules for the additional fields of a backward pass.

#pragma once

#include <optional>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/wire/validate.h"

namespace attend {

// `asked`: the pass of the RPC method, if it has only one. INVALID_ARGUMENT if `request` asks for
// the other. Sets `asked` to the request's pass.
Status CheckPass(const v1::AttendRequest& request, std::optional<Pass>& asked);

// Call last: `out` must have everything else of the request, which is a backward pass. Sets its
// tensors, its gradients and the outputs of the answer.
Status ValidateBackward(const v1::AttendRequest& request, Validated& out);

}  // namespace attend

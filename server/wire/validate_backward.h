// SPDX-License-Identifier: Apache-2.0
//
// The rules for what a backward pass has beside its attention: the part of validate.h that reads
// BackwardPass.

#pragma once

#include <optional>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/wire/validate.h"

namespace attend {

// `asked` is the pass that the call takes, if it does not take both: INVALID_ARGUMENT if that is
// not what `request` asks for. Sets it to what is.
Status CheckPass(const v1::AttendRequest& request, std::optional<Pass>& asked);

// Call last: `out` has everything else of the request, which has a backward pass. Sets its tensors,
// its gradients and what the answer has.
Status ValidateBackward(const v1::AttendRequest& request, Validated& out);

}  // namespace attend

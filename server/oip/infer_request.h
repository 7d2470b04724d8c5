// SPDX-License-Identifier: Apache-2.0
//
// Translates a ModelInferRequest to the equivalent AttendRequest. Tensor bytes stay in place;
// numbers, such as lengths, are encoded again in a tail appended to the message.

#pragma once

#include <google/protobuf/arena.h>

#include "kernels/util/status.h"
#include "server/oip/infer_state.h"
#include "server/request/request.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend::oip {

// `state` belongs to the request; FindParts has filled it. Sets message.fields, on the arena, and
// the raw entries and arrays of its scan.
Status BuildRequest(google::protobuf::Arena& arena, InferState& state, MessageSlices& slices,
                    RequestMessage& message, Request& request);

}  // namespace attend::oip

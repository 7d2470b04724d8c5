// SPDX-License-Identifier: Apache-2.0
//
// Makes of a ModelInferRequest the AttendRequest that asks for the same. Tensor bytes stay where
// they are; numbers, such as lengths, are written anew, behind the message.

#pragma once

#include <google/protobuf/arena.h>

#include "kernels/util/status.h"
#include "server/oip/infer_state.h"
#include "server/request/request.h"
#include "server/wire/message_slices.h"
#include "server/wire/request_codec.h"

namespace attend::oip {

// `state`, whose parts were found, is the request's. Sets message.fields, on the arena, and the
// raw entries and arrays of its scan.
Status BuildRequest(google::protobuf::Arena& arena, InferState& state, MessageSlices& slices,
                    RequestMessage& message, Request& request);

}  // namespace attend::oip

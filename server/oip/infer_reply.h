// SPDX-License-Identifier: Apache-2.0
//
// Encodes ModelInferResponse and ModelStreamInferResponse. As in AttendResponse, large tensors are
// sent from the request's output block without a copy.

#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/util/message.h"

namespace attend::oip {

// Consumes the request, whose status must be OK. `on_stream`: wrapped in a
// ModelStreamInferResponse.
OutMessage EncodeInferReply(std::unique_ptr<Request> request, int64_t total_ns, bool on_stream);
// A stream's answer to a failed request.
OutMessage EncodeInferFailure(const std::string& id, const Status& status);

}  // namespace attend::oip

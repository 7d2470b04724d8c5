// SPDX-License-Identifier: Apache-2.0
//
// An AttendResponse as gRPC's buffers. Large tensors are not copied: gRPC sends from the request's
// output block, which goes back to its pool when gRPC lets go of the last byte, on any thread.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "attend/v1/attention.pb.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/wire/answer_watch.h"

namespace attend {

// The small fields of an answer that came out well; `raw` stays empty.
void FillResponse(const Request& request, int64_t total_ns, v1::AttendResponse* response);
// The shape of O and of LSE.
void FillOutputTensors(const Request& request, v1::AttendResponse* response);

// Takes the request, whose status is OK. It must not be touched afterwards. `call` hears what of a
// large answer has left.
grpc::ByteBuffer EncodeReply(std::unique_ptr<Request> request, int64_t total_ns, WatchedRef call);

// A stream's answer to a request that failed.
grpc::ByteBuffer EncodeFailure(const std::string& request_id, const Status& status,
                               int64_t retry_after_ms);

}  // namespace attend

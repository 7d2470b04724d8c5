// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a ModelInferRequest as fields of an AttendRequest. A number may come as a
// string too, because perf_analyzer cannot send fractions otherwise. Pure.

#pragma once

#include <google/protobuf/map.h>

#include <optional>
#include <string>

#include "attend/v1/attention.pb.h"
#include "inference/grpc_service.pb.h"
#include "kernels/util/status.h"
#include "server/oip/models.h"
#include "server/request/request.h"

namespace attend::oip {

using ParameterMap = google::protobuf::Map<std::string, inference::InferParameter>;

// Sets the mask, scale and so on of `fields`, and the deadline of `request`. INVALID_ARGUMENT names
// the parameter, UNIMPLEMENTED one that this server knows and does not have.
Status TakeParameters(const ParameterMap& parameters, const Model& model, v1::AttendRequest& fields,
                      Request& request);

// Where a tensor's parameters say that its bytes are.
struct RegionParameters {
  std::string region;
  int64_t offset = 0;
  int64_t bytes = 0;
};
// Nothing if they name no region. `what` names the tensor.
Result<std::optional<RegionParameters>> TakeRegion(const ParameterMap& parameters,
                                                   const std::string& what);

}  // namespace attend::oip

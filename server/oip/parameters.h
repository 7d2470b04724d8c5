// SPDX-License-Identifier: Apache-2.0
//
// Translates a ModelInferRequest's parameters to AttendRequest fields. Numbers may be given as
// strings, because perf_analyzer cannot send fractions otherwise. Pure.

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
// the parameter; UNIMPLEMENTED names a known parameter that this server does not support.
Status TakeParameters(const ParameterMap& parameters, const Model& model, v1::AttendRequest& fields,
                      Request& request);

// The place of a tensor's bytes, from its parameters.
struct RegionParameters {
  std::string region;
  int64_t offset = 0;
  int64_t bytes = 0;
};
// Empty if they name no region. `what` names the tensor in errors.
Result<std::optional<RegionParameters>> TakeRegion(const ParameterMap& parameters,
                                                   const std::string& what);

}  // namespace attend::oip

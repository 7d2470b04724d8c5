// SPDX-License-Identifier: Apache-2.0
//
// AttendRequests converted to the Open Inference Protocol. Uses only the generated classes, so that
// the server's own conversion is compared with an independent one.

#pragma once

#include <random>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "inference/grpc_service.pb.h"

namespace attend::test {

// How an input's bytes are sent.
enum class Sent { kRaw, kTyped };

// Whether a model accepts the request: no gradients, sessions, or bias of bits.
bool IsInferable(const v1::AttendRequest& request);
// Whether its tensors may be sent typed: all are FLOAT32.
bool MayBeTyped(const v1::AttendRequest& request);
// Inputs in random order, integers of 32 or 64 bits, numeric parameters as numbers or strings.
inference::ModelInferRequest ToInfer(const v1::AttendRequest& request, Sent sent,
                                     std::mt19937_64& random);
// Typed where possible.
inference::ModelInferRequest ToInfer(const v1::AttendRequest& request, std::mt19937_64& random);

// q, k, v of zeros in BHLD FP32: B1 H1 L4 D8.
inference::ModelInferRequest PlainInfer(const std::string& model = "attention_fp32_bhld_full");

// Places the input or output in the region.
void PutInRegion(const std::string& region, int64_t bytes, int64_t offset,
                 google::protobuf::Map<std::string, inference::InferParameter>& parameters);
// Requests with tensors and with numbers in the region, whose bytes are zeros; the last claims more
// bytes than exist.
std::vector<inference::ModelInferRequest> InfersInRegion(const std::string& region);

}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// Requests with one fault each, and the server's expected message.

#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"

namespace attend::test {

struct BadRequest {
  const char* name;
  std::function<void(v1::AttendRequest&)> spoil;  // of a B1 H2 L8 D16 fp32 BHLD request
  std::vector<std::string> says;                  // all of it must be in the message
  grpc::StatusCode code = grpc::StatusCode::INVALID_ARGUMENT;
};

std::vector<BadRequest> BadShapes();
std::vector<BadRequest> BadMatches();  // tensors that do not fit each other
std::vector<BadRequest> BadBytes();
std::vector<BadRequest> BadValues();
std::vector<BadRequest> BadTerms();
std::vector<BadRequest> BadLengths();
std::vector<BadRequest> BadBiases();
std::vector<BadRequest> BadTrees();

}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// A request for gradients as a message, and the judge of its answer.

#pragma once

#include <cstdint>
#include <string>

#include "attend/v1/attention.pb.h"
#include "tests/kernels/support/owned_gradients.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

class WireGradients {
 public:
  // O and LSE are the reference's. Asks for every gradient.
  WireGradients(ProblemSpec spec, uint64_t seed);
  WireGradients(const WireGradients&) = delete;

  v1::AttendRequest request;

  // Checks the answer's entries, and every element against the definition in double precision.
  // Empty if all are right.
  std::string Judge(const v1::AttendResponse& response);

 private:
  const ProblemSpec spec_;
  const bool heads_outside_ = spec_.layout == test::Layout::kBHLD;
  const OwnedAttention owned_;
  OwnedGradients gradients_;
};

}  // namespace attend::test

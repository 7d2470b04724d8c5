// SPDX-License-Identifier: Apache-2.0
//
// A gradient call and its answer in the kernels' form. Plain values.

#pragma once

#include "client/call/attention_call.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"

namespace attend::client {

struct DescribedBackward {
  Attention attention;  // with the O and LSE of the call
  Gradients gradients;  // with the tensors of the answer
};
// As Describe. Refers to the memory of both. INVALID_ARGUMENT names what does not fit together.
// INTERNAL: the answer lacks a requested gradient.
Result<DescribedBackward> DescribeBackward(const AttentionCall& call,
                                           const AttentionResult& result);

}  // namespace attend::client

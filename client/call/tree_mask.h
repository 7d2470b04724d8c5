// SPDX-License-Identifier: Apache-2.0
//
// The mask of a draft whose tokens are a tree, on the client's side (kernels/contract/tree.h): made
// from the tokens' parents, and written out as a bias where no server does it.

#pragma once

#include <cstdint>
#include <span>

#include "client/call/attention_call.h"
#include "kernels/contract/problem.h"

namespace attend::client {

// The bits [1, T, T] of the tree in which parents[i] is the parent of token i, or -1: each token
// sees itself and its ancestors. INVALID_ARGUMENT: more than 1024 tokens, or a parent that does not
// precede its token.
Result<HostTensor> TreeFromParents(std::span<const int64_t> parents);

// Sets the bias that the call's tree is written out as, without its memory. The attention has the
// call's sizes and lengths. INVALID_ARGUMENT: the tree has a bias beside it, or does not fit.
Status DescribeTree(const AttentionCall& call, Attention* attention);

// The call with its tree written out as a bias; unchanged without a tree. `attention` has the
// call's sizes and lengths; in the second form Describe gives them.
Result<AttentionCall> WithTreeAsBias(const AttentionCall& call, Attention attention);
Result<AttentionCall> WithTreeAsBias(const AttentionCall& call);

}  // namespace attend::client

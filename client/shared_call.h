// SPDX-License-Identifier: Apache-2.0
//
// Calls over shared memory: where in a region their tensors go. Pure but for the copies.

#pragma once

#include <cstdint>

#include "client/attention_call.h"
#include "client/shared_memory.h"

namespace attend::client {

// Room in a region for the call's tensors, and for its answer's; each tensor's offset is aligned.
int64_t SharedInputBytes(const AttentionCall& call);
int64_t SharedOutputBytes(const AttentionCall& call);

// Copies the call's tensors to `place` and behind, and lets the call name them there. What was
// there before must not be in use by another call.
void ShareInputs(const SharedPlace& place, AttentionCall* call);
// Lets the answer be written to `place` and behind: O, then LSE if asked for.
SharedOutputs ShareOutputs(const SharedPlace& place, const AttentionCall& call);

// The call over a region of its own, answer and all.
Result<AttentionCall> ShareCall(SharedMemory& memory, const AttentionCall& call);

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Calls over shared memory: where in a region their tensors go. Pure but for the copies.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "client/call/attention_call.h"
#include "client/memory/shared_memory.h"

namespace attend::client {

// Room in a region for the call's tensors, and for its answer's; each tensor's offset is aligned.
int64_t SharedInputBytes(const AttentionCall& call);
int64_t SharedOutputBytes(const AttentionCall& call);

// Copies the call's tensors to `place` and behind, and lets the call name them there. What was
// there before must not be in use by another call. Of a device's region the call's `data` stays the
// host's.
Status ShareInputs(const SharedPlace& place, AttentionCall* call);
// Lets the answer be written to `place` and behind: O, then LSE if asked for.
SharedOutputs ShareOutputs(const SharedPlace& place, const AttentionCall& call);

// A new region for `bytes` bytes.
using MakeRegion = std::function<Result<std::shared_ptr<SharedRegion>>(int64_t bytes)>;

// The call over a region of its own, answer and all.
Result<AttentionCall> ShareCall(const MakeRegion& make_region, const AttentionCall& call);
Result<AttentionCall> ShareCall(SharedMemory& memory, const AttentionCall& call);

}  // namespace attend::client

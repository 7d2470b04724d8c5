// SPDX-License-Identifier: Apache-2.0
//
// Places a call's tensors in regions of shared memory. Pure except for the copies.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "client/call/attention_call.h"
#include "client/memory/shared_memory.h"

namespace attend::client {

// Bytes of a region that the call's tensors, or its answer's, take; every tensor's offset is
// aligned.
int64_t SharedInputBytes(const AttentionCall& call);
int64_t SharedOutputBytes(const AttentionCall& call);

// Copies the call's tensors into the region from `place` on, and makes the call refer to them
// there. No other call may be using that part of the region. In a device's region the call's `data`
// still points to the host's tensors.
Status ShareInputs(const SharedPlace& place, AttentionCall* call);
// The answer's places from `place` on, in the order of AnswerTensors.
SharedOutputs ShareOutputs(const SharedPlace& place, const AttentionCall& call);

// Replaces the answer's tensors by copies with memory of their own.
void DetachTensors(AttentionResult* result);

// Makes a new region of `bytes` bytes.
using MakeRegion = std::function<Result<std::shared_ptr<SharedRegion>>(int64_t bytes)>;

// The call with its tensors and its answer in a new region.
Result<AttentionCall> ShareCall(const MakeRegion& make_region, const AttentionCall& call);
Result<AttentionCall> ShareCall(SharedMemory& memory, const AttentionCall& call);

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// A copy of a request's input block on a device, made while the block fills, as the request sees
// it; upload/staging.h makes them. One thread at a time, except for Arrived.

#pragma once

#include <cstdint>

#include "kernels/contract/backend.h"

namespace attend {

// The end of an upload that was large enough to be staged.
enum class StagingEnd {
  kUsed = 0,    // it ran on the copy
  kBudget,      // never staged: the device's staging memory was taken
  kNoMemory,    // never staged: the device had none
  kCopyFailed,  // it was computed from the block, as in the next two cases
  kDeviceLost,
  kQueueFull,  // the queue of the device that has the copy
  kAborted,    // the upload failed, or the request was refused
};
inline constexpr int kStagingEndCount = 7;

class DeviceCopy {
 public:
  virtual ~DeviceCopy() = default;

  // Bytes of a tensor have arrived in the block: enqueues the copies of the pieces that they
  // complete. Thread-safe; each byte once. Not on gRPC's threads: a device's driver may be slow.
  // All calls must have returned before Finish, Drop or the destructor.
  virtual void Arrived(const char* data, int64_t bytes) = 0;
  // All tensors have arrived. Returns whether their copy is on the device, or will be before a
  // kernel that is started with Apply; drops it if not. Call at most once.
  virtual bool Finish() = 0;
  // The device that has the copy; -1 if there is none.
  virtual int device() const = 0;
  // The request goes on without the copy, if there is one.
  virtual void Drop(StagingEnd why) = 0;
  // For the lane: makes the tensors of `item` that are in the block, and what it appends, refer to
  // the copy, if there is one. The small arrays stay on the host, and for other uses the tensors do
  // too.
  virtual void Apply(WorkItem* item) = 0;
};

}  // namespace attend

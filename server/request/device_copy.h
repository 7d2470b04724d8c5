// SPDX-License-Identifier: Apache-2.0
//
// A device copy of a request's input block, filled while the upload is still arriving. The request
// sees this interface; upload/staging.h implements it. Used by one thread at a time, except for
// Arrived.

#pragma once

#include <cstdint>

#include "kernels/contract/backend.h"

namespace attend {

// How staging ended, for an upload that was large enough to be staged.
enum class StagingEnd {
  kUsed = 0,    // the request ran on the copy
  kBudget,      // never staged: the device's staging budget was used up
  kNoMemory,    // never staged: the device had no memory left
  kCopyFailed,  // computed from the input block, as in the next two cases
  kDeviceLost,
  kQueueFull,  // the copy's device had a full queue
  kAborted,    // the upload failed, or the request was refused
};
inline constexpr int kStagingEndCount = 7;

class DeviceCopy {
 public:
  virtual ~DeviceCopy() = default;

  // Bytes of a tensor have arrived in the input block: enqueues copies of the pieces that are now
  // complete. Thread-safe; each byte is reported once. Must not be called on a loop, because the
  // device driver may be slow. All calls must return before Finish, Drop or the destructor.
  virtual void Arrived(const char* data, int64_t bytes) = 0;
  // All tensors have arrived. Returns true if the copy is complete on the device, or will be before
  // a kernel launched after Apply runs; otherwise drops the copy. Called at most once.
  virtual bool Finish() = 0;
  // The device that holds the copy; -1 if there is none.
  virtual int device() const = 0;
  // Drops the copy, if any; the request continues without it.
  virtual void Drop(StagingEnd why) = 0;
  // Called by the lane. Redirects the tensors of `item` that are in the block, and the rows it
  // appends, to the copy, if there is one. The small arrays stay on the host, as do the tensors for
  // every other use.
  virtual void Apply(WorkItem* item) = 0;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// A copy of a request's input block on a device, made while the block fills, as the request sees
// it; upload/staging.h makes them. One thread at a time, except for methods that say otherwise and
// for Apply by parts.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/util/byte_ranges.h"

namespace attend {

// What happened to an upload that was large enough to be staged.
enum class StagingEnd {
  kUsed = 0,    // it ran on the copy
  kBudget,      // never staged: the device's staging memory was taken
  kNoMemory,    // never staged: the device had none
  kSplit,       // never staged: it runs on several devices
  kCopyFailed,  // fell back to the normal path, except for parts already begun (upload_run.h)
  kDeviceLost,
  kQueueFull,  // the queue of the device that has the copy
  kAborted,    // the upload failed, or the request was refused
};
inline constexpr int kStagingEndCount = 8;

class DeviceCopy {
 public:
  virtual ~DeviceCopy() = default;

  // Bytes of a tensor have arrived in the block. Returns the pieces that they complete, for Copy.
  // Does not touch the device. Thread-safe; each byte once.
  virtual std::vector<ByteRange> Arrived(const char* data, int64_t bytes) = 0;
  // Enqueues the copies of `pieces`; false if that failed. Thread-safe, but not on gRPC's threads:
  // a device's driver may be slow. All calls must have returned before Seal, Finish or the
  // destructor.
  virtual bool Copy(std::span<const ByteRange> pieces) = 0;
  // The event, for Apply, after which all pieces are on the device whose Copy has returned. Lives
  // as long as this object. Thread-safe; call before Seal and Finish.
  virtual Result<const DeviceEvent*> Mark() = 0;
  // One of `parts` parts has been queued on the device: its share of the cost is no longer only
  // expected. Thread-safe.
  virtual void ForgetShare(int64_t parts) = 0;

  // All tensors have arrived. Returns whether their copy is on the device, or will be before a
  // kernel that is started with Apply. May be called again.
  virtual bool Seal() = 0;
  // The same, but drops the copy if it returns false.
  virtual bool Finish() = 0;
  // Counts the end of a request whose parts use the copy, or the marked ranges of it: it can no
  // longer be dropped.
  virtual void CountRun(StagingEnd end) = 0;
  // The device that has the copy; -1 if there is none.
  virtual int device() const = 0;
  // The request goes on without the copy, if there is one.
  virtual void Drop(StagingEnd why) = 0;
  // For the lane: makes the tensors of `item` that are in the block, and what it appends, refer to
  // the copy, if there is one. The small arrays stay on the host, and for other uses the tensors do
  // too. `after`: the event after which the tensors are there; if null, the one of Seal or Finish.
  virtual void Apply(WorkItem* item, const DeviceEvent* after = nullptr) = 0;
  virtual const DeviceEvent* after() const = 0;  // the latter
  // The host address of the first tensor.
  virtual const char* block() const = 0;
};

}  // namespace attend

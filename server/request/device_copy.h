// SPDX-License-Identifier: Apache-2.0
//
// A copy of a request's input block that a device takes while the block fills, as the request sees
// it; upload/staging.h makes them. One thread at a time, but for what says otherwise and, of parts,
// Apply.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/contract/backend.h"
#include "kernels/util/status.h"
#include "server/util/byte_ranges.h"

namespace attend {

// What became of an upload that was large enough.
enum class StagingEnd {
  kUsed = 0,    // it ran on the copy
  kBudget,      // never staged: the device's staging memory was taken
  kNoMemory,    // never staged: the device had none
  kSplit,       // never staged: it runs on several devices
  kCopyFailed,  // these went the ordinary way, or what of them had not begun (upload_run.h)
  kDeviceLost,
  kQueueFull,  // of the device that has the copy
  kAborted,    // the upload did not end well, or the request was refused
};
inline constexpr int kStagingEndCount = 8;

class DeviceCopy {
 public:
  virtual ~DeviceCopy() = default;

  // Bytes of a tensor are complete in the block: the pieces for Copy, which are complete with them.
  // Touches no device. Any threads at once; each byte once.
  virtual std::vector<ByteRange> Arrived(const char* data, int64_t bytes) = 0;
  // Enqueues their copies; false if it could not. Any threads at once, none of the wire's: a
  // device's driver may take its time. All calls have returned before Seal, Finish or the
  // destructor.
  virtual bool Copy(std::span<const ByteRange> pieces) = 0;
  // What must have ended on the device before all is there that Copy was given and returned from,
  // for Apply. Lives as long as this does. Any threads, before Seal and Finish.
  virtual Result<const DeviceEvent*> Mark() = 0;
  // One of so many parts is the device's: no more is that expected of it. Any threads.
  virtual void ForgetShare(int64_t parts) = 0;

  // All tensors have arrived: whether their copy is on the device, or will be before a kernel that
  // is started with Apply. May be asked again.
  virtual bool Seal() = 0;
  // The same, and drops a copy of which that is not so.
  virtual bool Finish() = 0;
  // Of a request whose parts have the copy, or what of it was marked: it is not dropped any more.
  virtual void CountRun(StagingEnd end) = 0;
  // Where the copy is; none: -1.
  virtual int device() const = 0;
  // The request goes on without the copy, if there is one.
  virtual void Drop(StagingEnd why) = 0;
  // For the lane: moves the tensors of `item`, which lie in the block, to the copy, if there is
  // one. The small arrays stay on the host, and for all others the tensors do too. `after`: what
  // must have ended before they are there; without it, what Seal or Finish has seen to.
  virtual void Apply(WorkItem* item, const DeviceEvent* after = nullptr) = 0;
  virtual const DeviceEvent* after() const = 0;  // the latter
  // Where the first tensor begins on the host.
  virtual const char* block() const = 0;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Computes a chunked request while it arrives. As soon as a device has everything that a group of
// its heads (upload_plan.h) reads, the group is ready. It is then queued as a request of its own, a
// part, which reads the device's copy of the upload (staging.h) and writes its range of the answer.
// While bytes are missing, the number of open parts, queued or running, is limited; whenever one
// ends the next is begun. With the last byte all other parts are ready; those whose copy failed use
// the host's memory. An upload has one queue slot, which its first part takes. Until one has been
// queued, parts are tried one at a time; a refused part is retried when another is queued or ends,
// or when the last byte arrives.
//
//   of a part:
//   missing bytes --Copied, Complete--> ready --Begin--> open --Finish--> ended
//                                         ^               |
//                                         +--- refused ---+
//
// An optimisation: if no part was queued before the last byte, the request takes the normal path.
// From the first part on, the request is bound to its device: if that is lost, the request fails.
//
// The parts use the whole's memory, so the whole must not be freed while one runs. After the last
// byte, Complete keeps it until the parts have ended; before that, or if it is never completed,
// Stop tells when they have. Thread-safe; the mutex is not held while anything else is called.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/request/part_set.h"
#include "server/request/request.h"
#include "server/upload/upload_plan.h"
#include "server/util/byte_ranges.h"

namespace attend {

class UploadRun final : public Responder, public std::enable_shared_from_this<UploadRun> {
 public:
  // How the engine runs parts. All may be called from any thread, also from within each other.
  struct Hooks {
    // Sends a part to part->device; takes it if and only if OK. It then ends through its responder.
    std::function<Status(std::unique_ptr<Request>& part)> push;
    // Ends a part that is still queued with CANCELLED (or DEADLINE_EXCEEDED).
    std::function<void(int device, uint64_t id)> cancel;
    // Takes the whole, which has ended.
    std::function<void(std::unique_ptr<Request> whole)> finish;
    // A part was queued while bytes of others were missing.
    std::function<void()> count_early;
  };
  // Called for every part that has ended, with its status, before Complete or Stop take notice of
  // it.
  using PartEnded = std::function<void(const Request& part)>;

  // One part for each group, made from `whole` by MakeParts; their ids count up from the first's,
  // and their selections are set. The whole is staged, and its device is set. At least one part may
  // be open.
  UploadRun(Request& whole, std::vector<UploadGroup> groups,
            std::vector<std::unique_ptr<Request>> parts, int64_t open_max, Hooks hooks);

  // Call once, before the first byte.
  void OnPartEnded(PartEnded part_ended) { part_ended_ = std::move(part_ended); }

  // Copies of these ranges of the input block were enqueued: parts that now have all their bytes
  // are ready. Thread-safe, each byte once; all calls must have returned before Complete or the end
  // of the whole.
  void Copied(std::span<const ByteRange> ranges);

  // Whether a part was ever queued.
  bool begun();
  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }

  // All bytes have arrived; `copied`: the device's copy is complete, or will be before anything
  // started now. Begins the remaining parts. When all parts have ended, possibly before this
  // returns, gives the whole to Hooks::finish: with the answer that they wrote, or with the first
  // failure. Times of copies and kernels are sums; the queue's times are those of the part that was
  // queued last.
  void Complete(std::unique_ptr<Request> whole, bool copied);

  // The whole is no longer wanted: no part is begun from now on, queued ones are dropped, and the
  // whole, if completed, ends with `why` unless it has failed before.
  void Cancel(Status why);
  // The same for a whole that is not completed, and ends in another way: calls `idle` when no part
  // runs, possibly before this returns. Call once.
  void Stop(std::function<void()> idle);

  // Responder of a part.
  void Finish(std::unique_ptr<Request> part) override;

 private:
  struct Part {
    std::vector<ByteRange> tensors;         // in the block
    std::atomic<int64_t> missing_bytes{0};  // of them

    // These two with mutex_ held.
    // The event after which all its bytes are on the device. Null: unknown before Complete.
    const DeviceEvent* mark = nullptr;
    bool begun = false;  // or a thread is trying to

    // These belong to the thread that took it.
    std::unique_ptr<Request> request;  // until it is queued
    bool early = false;                // while bytes of others were missing
    bool cost_released = false;        // ForgetShare was called for it
  };

  // Claims the part to begin it; false if another thread has, or if it should not begin now.
  bool TakeLocked(Part& part) ATTEND_REQUIRES(mutex_);
  bool Take(Part& part);
  Part* TakeNextLocked() ATTEND_REQUIRES(mutex_);
  void Begin(Part& part);
  Part* Push(Part& part);
  // Sets where the part reads its tensors, and what it waits for.
  void PlaceLocked(Part& part) const ATTEND_REQUIRES(mutex_);
  bool SomeMissing() const;
  void Refused(Part& part, Status status);
  bool Fail(Status status);
  void CancelParts();
  void Dropped(bool part);
  // What to end, outside the lock, now that nothing runs.
  struct Ended {
    std::unique_ptr<Request> whole;
    std::function<void()> idle;
  };
  Ended TakeEndedLocked() ATTEND_REQUIRES(mutex_);
  void End(Ended ended);

  const uint64_t first_id_;
  const int device_;
  DeviceCopy& staged_;  // the whole's
  const int64_t open_max_;
  const Hooks hooks_;
  PartEnded part_ended_;
  std::vector<Part> parts_;

  Mutex mutex_;
  // Open: begun and not ended.
  PartSet set_ ATTEND_GUARDED_BY(mutex_){PartSet::Times::kSums, 0};
  bool completing_ ATTEND_GUARDED_BY(mutex_) = false;  // Complete begins parts
  bool complete_ ATTEND_GUARDED_BY(mutex_) = false;    // all bytes have come
  bool copied_ ATTEND_GUARDED_BY(mutex_) = false;      // with it
  bool begun_ ATTEND_GUARDED_BY(mutex_) = false;
  Status refusal_ ATTEND_GUARDED_BY(mutex_);                  // the last
  std::unique_ptr<Request> whole_ ATTEND_GUARDED_BY(mutex_);  // from Complete on
  std::function<void()> idle_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend

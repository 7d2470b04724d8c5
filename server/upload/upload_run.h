// SPDX-License-Identifier: Apache-2.0
//
// A chunked request that is computed while it arrives: as soon as a device has all that a group of
// its heads (upload_plan.h) reads, the group is ready, and is queued as a request of its own, a
// part, that reads the device's copy of the upload (staging.h) and writes its run of the answer.
// While bytes are missing at most so many parts are open at once, queued or running, and whenever
// one ends the next is begun. With the last byte all others are ready, those that the copy has
// failed on the host's memory. An upload has one place in its queue, which its first part takes:
// until one was queued they are tried one at a time, and those that find no place wait for another
// to be queued or to end, or for the last byte.
//
// An optimisation: if no part was queued before the last byte, the request goes its ordinary way.
// From the first part on it is its device's: if that is lost, the request fails.
//
// The parts use the whole's memory, so whoever has the whole must not let go of it while one runs:
// after the last byte Complete keeps it until the parts have ended; before, and if nobody completes
// it, Stop says when they have. Thread-safe; the mutex is not held while anything else is called.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "server/request/request.h"
#include "server/upload/upload_plan.h"
#include "server/util/byte_ranges.h"

namespace attend {

class UploadRun final : public Responder, public std::enable_shared_from_this<UploadRun> {
 public:
  // How the engine runs parts. All may be called from any thread, also from inside of each other.
  struct Hooks {
    // Sends a part to part->device; takes it if and only if OK. It then ends by its responder.
    std::function<Status(std::unique_ptr<Request>& part)> push;
    // Ends a part that is still queued with CANCELLED (or DEADLINE_EXCEEDED).
    std::function<void(int device, uint64_t id)> cancel;
    // Takes the whole, ended.
    std::function<void(std::unique_ptr<Request> whole)> finish;
    // A part was queued while bytes of others were missing.
    std::function<void()> count_early;
  };
  // Told of every part that has ended, with its status, before Complete or Stop hear of it.
  using PartEnded = std::function<void(const Request& part)>;

  // One part for each group, which MakeParts has made of `whole`; their ids count up from the
  // first's, and their selections are set. The whole is staged, and its device is set. At least one
  // part may be open.
  UploadRun(const Request& whole, std::vector<UploadGroup> groups,
            std::vector<std::unique_ptr<Request>> parts, int64_t open_max, Hooks hooks);

  // Once, before the first byte.
  void OnPartEnded(PartEnded part_ended) { part_ended_ = std::move(part_ended); }

  // Copies of these ranges of the input block were enqueued: the parts that have all their bytes
  // with them are ready. Any threads at once, each byte once; all have returned before Complete or
  // the end of the whole.
  void Copied(std::span<const ByteRange> ranges);

  // Whether a part was ever queued.
  bool begun();
  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }

  // All bytes have come; `copied`: the device's copy is whole, or will be before what is started
  // now. Begins what was not, and gives the whole to Hooks::finish, maybe before this returns, when
  // all parts have ended: with the answer that they wrote, or with the first failure. Times of
  // copies and kernels are sums, those of the queue the part's that was queued last.
  void Complete(std::unique_ptr<Request> whole, bool copied);

  // The whole is wanted no more: no part is begun from now on, those queued are dropped, and the
  // whole, if completed, ends with `why` unless it has failed before.
  void Cancel(Status why);
  // The same for a whole that was not or will not be completed, and that ends by other means: calls
  // `quiet`, maybe before this returns, when no part runs. Once.
  void Stop(std::function<void()> quiet);

  // Of a part.
  void Finish(std::unique_ptr<Request> part) override;

 private:
  struct Part {
    std::vector<ByteRange> tensors;         // in the block
    std::atomic<int64_t> missing_bytes{0};  // of them
    std::unique_ptr<Request> request;       // until it is queued
    // What has brought all its bytes to the device. Null: nothing says so before Complete.
    const DeviceEvent* mark = nullptr;
    bool begun = false;      // or somebody tries
    bool early = false;      // while bytes of others were missing
    bool forgotten = false;  // its share of DeviceCopy's expected cost
  };

  // Takes the part to begin it; false if somebody else has, or nobody should now.
  bool TakeLocked(Part& part);
  bool Take(Part& part);
  Part* TakeNextLocked();
  void Begin(Part& part);
  Part* Push(Part& part);
  // Where it reads its tensors, and what it waits for.
  void PlaceLocked(Part& part) const;
  bool SomeMissing() const;
  void Refused(Part& part, Status status);
  bool Fail(Status status);
  void CancelParts();
  void Dropped(bool part);
  // What is to be ended now that nothing runs, outside the lock.
  struct Ended {
    std::unique_ptr<Request> whole;
    std::function<void()> quiet;
  };
  Ended TakeEndedLocked();
  void End(Ended ended);

  const uint64_t first_id_;
  const int device_;
  DeviceCopy& staged_;  // the whole's
  const int64_t open_max_;
  const Hooks hooks_;
  PartEnded part_ended_;
  std::vector<Part> parts_;

  std::mutex mutex_;
  int64_t open_ = 0;         // parts begun and not ended
  bool completing_ = false;  // Complete begins parts
  bool complete_ = false;    // all bytes have come
  bool copied_ = false;      // with it
  bool begun_ = false;
  Status refusal_;                  // the last
  Status failure_;                  // the first; OK while all is well
  std::unique_ptr<Request> whole_;  // from Complete on
  std::function<void()> quiet_;
  int64_t copy_in_ns_ = 0, kernel_ns_ = 0, copy_out_ns_ = 0;
  struct {
    TimePoint enqueued, started, completed;
    int64_t batch_requests = 0;
  } last_;  // the part that was queued last, but `completed` of that which ended last
};

}  // namespace attend

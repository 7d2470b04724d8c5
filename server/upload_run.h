// SPDX-License-Identifier: Apache-2.0
//
// A chunked request that is computed while it arrives: as soon as a device has all that a group of
// its heads (upload_plan.h) reads, the group is queued as a request of its own, a part, that reads
// the device's copy of the upload (staging.h) and writes its run of the answer. An optimisation: no
// part need be begun before the last byte. Those that were not are begun then, without the copy if
// it has failed, and those that find no room then whenever another of them has ended; if none was,
// the request goes its ordinary way. From the first part on it is its device's: if that is lost,
// the request fails.
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

#include "server/byte_ranges.h"
#include "server/request.h"
#include "server/upload_plan.h"

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
  };
  // Told of every part that has ended, with its status, before Complete or Stop hear of it.
  using PartEnded = std::function<void(const Request& part)>;

  // One part for each group, which MakeParts has made of `whole`; their ids count up from the
  // first's. The whole is staged, and its device and selection are set.
  UploadRun(const Request& whole, std::vector<UploadGroup> groups,
            std::vector<std::unique_ptr<Request>> parts, Hooks hooks);

  // Once, before the first byte.
  void OnPartEnded(PartEnded part_ended) { part_ended_ = std::move(part_ended); }

  // Copies of these ranges of the input block were enqueued: begins the parts that have all their
  // bytes with them. Any threads at once, each byte once; all have returned before Complete or the
  // end of the whole.
  void Copied(std::span<const ByteRange> ranges);

  // Whether a part was ever queued.
  bool begun();
  int64_t parts() const { return static_cast<int64_t>(parts_.size()); }

  // All bytes have come; `copied`: the device's copy is whole, or will be before what is started
  // now. Begins what was not, and gives the whole to Hooks::finish, maybe before this returns, when
  // all parts have ended: with the answer that they wrote, or with the first failure. Times are
  // sums, but for those of the queue, which are the last part's.
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
    bool begun = false;                     // or somebody tries
  };
  // Where parts that begin now read their tensors: in the device's copy of what has come, in that
  // of all, on the host.
  enum class Source { kMarked, kCopied, kHost };

  // Takes the part to begin it; false if somebody else has, or nobody should.
  bool TakeLocked(Part& part);
  bool Take(Part& part);
  void Begin(Part& part);
  Status Place(Request& part, Source source);
  Status Push(Part& part, Source source);
  void Refused(Part& part, Status status);
  bool Fail(Status status);
  void CancelParts();
  void Dropped(bool part);
  void End(std::unique_ptr<Request> whole);

  const uint64_t first_id_;
  const int device_;
  StagedInput& staged_;  // the whole's
  const Hooks hooks_;
  PartEnded part_ended_;
  std::vector<Part> parts_;

  std::mutex mutex_;
  int64_t open_ = 0;       // parts begun and not ended; during Complete, one more
  bool complete_ = false;  // all bytes have come
  bool begun_ = false;
  Source source_ = Source::kMarked;
  Status refusal_;                  // the last
  Status failure_;                  // the first; OK while all is well
  std::unique_ptr<Request> whole_;  // from Complete on
  std::function<void()> quiet_;
  int64_t copy_in_ns_ = 0, kernel_ns_ = 0, copy_out_ns_ = 0;
  struct {
    TimePoint enqueued, started, completed;
    int64_t batch_requests = 0;
  } last_;  // the part that ended last, by its device
};

}  // namespace attend

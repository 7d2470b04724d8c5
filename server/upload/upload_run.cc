// SPDX-License-Identifier: Apache-2.0

#include "server/upload/upload_run.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "server/request/tensor_extents.h"

namespace attend {
namespace {

// The ranges of the attention's tensors in the block, each separate.
std::vector<ByteRange> TensorsIn(const char* block, const Attention& attention) {
  std::vector<ByteRange> tensors;
  for (const Extent& tensor : InputExtents(attention)) {
    const int64_t begin = static_cast<const char*>(tensor.data) - block;
    if (tensor.bytes > 0) tensors.push_back({begin, begin + tensor.bytes});
  }
  return tensors;
}

int64_t Overlap(const ByteRange& a, const ByteRange& b) {
  return std::max<int64_t>(0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
}

}  // namespace

UploadRun::UploadRun(Request& whole, std::vector<UploadGroup> groups,
                     std::vector<std::unique_ptr<Request>> parts, int64_t open_max, Hooks hooks)
    : first_id_(parts.front()->id),
      device_(whole.device),
      staged_(*whole.source.copy()),
      open_max_(open_max),
      hooks_(std::move(hooks)),
      parts_(parts.size()) {
  for (size_t n = 0; n < parts.size(); ++n) {
    Part& part = parts_[n];
    part.request = std::move(parts[n]);
    part.request->responder = this;
    part.request->device = whole.device;
    part.request->source.SetPart({.parts = std::move(groups[n].parts)});
    part.tensors = TensorsIn(staged_.block(), part.request->attention);
    int64_t bytes = 0;
    for (const ByteRange& each : part.tensors) bytes += each.end - each.begin;
    part.missing_bytes.store(bytes, std::memory_order_relaxed);
  }
}

void UploadRun::Copied(std::span<const ByteRange> ranges) {
  std::vector<Part*> ready;
  for (const ByteRange& range : ranges) {
    for (Part& part : parts_) {
      int64_t came = 0;
      for (const ByteRange& each : part.tensors) came += Overlap(each, range);
      if (came == 0) continue;
      // Released by every call that enqueued copies, acquired by the call for the last ones.
      const int64_t missing = part.missing_bytes.fetch_sub(came, std::memory_order_acq_rel);
      assert(missing >= came && "a byte came twice");
      if (missing == came) ready.push_back(&part);
    }
  }
  for (Part* const part : ready) {
    // Now, because the device's copy may have ended when the part's turn comes.
    const Result<const DeviceEvent*> mark = staged_.Mark();
    if (!mark.ok()) continue;
    {
      const MutexLock lock(mutex_);
      part->mark = *mark;
    }
    if (Take(*part)) Begin(*part);
  }
}

bool UploadRun::TakeLocked(Part& part) {
  const bool ready = part.mark != nullptr || complete_;
  const bool its_turn = complete_ || set_.open() < (begun_ ? open_max_ : 1);
  if (part.begun || !ready || set_.failed() || !its_turn) return false;
  part.begun = true;
  part.early = !complete_ && SomeMissing();
  set_.Open();
  PlaceLocked(part);
  return true;
}

bool UploadRun::Take(Part& part) {
  const MutexLock lock(mutex_);
  return TakeLocked(part);
}

void UploadRun::PlaceLocked(Part& part) const {
  UploadPart& upload = *part.request->source.part();
  upload.has_slot = begun_;
  const bool on_device = part.mark != nullptr || copied_;
  upload.copy = on_device ? &staged_ : nullptr;
  upload.after = part.mark;
  if (on_device && upload.after == nullptr) upload.after = staged_.after();
}

bool UploadRun::SomeMissing() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& each) {
    return each.missing_bytes.load(std::memory_order_relaxed) > 0;
  });
}

UploadRun::Part* UploadRun::TakeNextLocked() {
  for (Part& part : parts_) {
    if (TakeLocked(part)) return &part;
  }
  return nullptr;
}

void UploadRun::Begin(Part& part) {
  const auto self = shared_from_this();
  for (Part* next = &part; next != nullptr;) next = Push(*next);
}

// Pushes the part. Returns the next part that may begin now, taken; null if there is none.
UploadRun::Part* UploadRun::Push(Part& part) {
  // From now on the part's own cost counts on the device, not its share of the expected cost.
  if (!std::exchange(part.cost_released, true)) staged_.ForgetShare(parts());
  std::unique_ptr<Request> request = std::move(part.request);
  Status status = hooks_.push(request);
  assert(status.ok() == (request == nullptr) && "taken if and only if OK");
  if (!status.ok()) {
    part.request = std::move(request);
    Refused(part, std::move(status));
    return nullptr;
  }
  bool cancelled = false;
  Part* next = nullptr;
  {
    const MutexLock lock(mutex_);
    begun_ = true;
    cancelled = set_.failed();
    next = TakeNextLocked();
  }
  if (part.early) hooks_.count_early();
  // A cancellation that came before the part was queued found nothing to cancel.
  if (cancelled) CancelParts();
  return next;
}

// There may be room after another part has ended, or with the last byte.
void UploadRun::Refused(Part& part, Status status) {
  {
    const MutexLock lock(mutex_);
    part.begun = false;
    const bool later = !complete_ || status.code() == Code::kResourceExhausted;
    if (!later) set_.Fail(status);
    refusal_ = std::move(status);
  }
  Dropped(/*part=*/false);
}

bool UploadRun::begun() {
  const MutexLock lock(mutex_);
  return begun_;
}

void UploadRun::Complete(std::unique_ptr<Request> whole, bool copied) {
  const auto self = shared_from_this();
  {
    const MutexLock lock(mutex_);
    assert(!complete_ && whole_ == nullptr);
    whole_ = std::move(whole);
    copied_ = copied;
    complete_ = completing_ = true;
  }
  for (Part& part : parts_) {
    if (Take(part)) Begin(part);
  }
  Ended ended;
  {
    const MutexLock lock(mutex_);
    completing_ = false;
    ended = TakeEndedLocked();
  }
  End(std::move(ended));
}

void UploadRun::Cancel(Status why) {
  const auto self = shared_from_this();
  if (Fail(std::move(why))) CancelParts();
}

void UploadRun::Stop(std::function<void()> idle) {
  const auto self = shared_from_this();
  const bool first = Fail(Status(Code::kCancelled, "the upload has ended"));
  bool running = false;
  {
    const MutexLock lock(mutex_);
    running = set_.open() > 0 || completing_;
    assert(idle_ == nullptr && whole_ == nullptr);
    if (running) idle_ = std::exchange(idle, nullptr);
  }
  if (!running) return idle();
  if (first) CancelParts();
}

void UploadRun::Finish(std::unique_ptr<Request> part) {
  const auto self = shared_from_this();
  assert(part->id - first_id_ < parts_.size());
  if (part_ended_) part_ended_(*part);
  bool first_failure = false;
  if (part->status.ok()) {
    const MutexLock lock(mutex_);
    set_.Add(*part);
  } else {
    first_failure = Fail(part->status);
  }
  part.reset();  // before the client is told
  if (first_failure) CancelParts();
  Dropped(/*part=*/true);
}

// Returns whether this was the first failure.
bool UploadRun::Fail(Status status) {
  const MutexLock lock(mutex_);
  return set_.Fail(std::move(status));
}

// Cancels the parts that are still queued; the others are not found.
void UploadRun::CancelParts() {
  for (size_t n = 0; n < parts_.size(); ++n) hooks_.cancel(device_, first_id_ + n);
}

// One fewer is open. If it was a part, there may be room for the next one.
void UploadRun::Dropped(bool part) {
  Part* next = nullptr;
  Ended ended;
  {
    const MutexLock lock(mutex_);
    set_.Close();
    if (part) {
      begun_ = true;  // it was queued, even if the thread that did so has not recorded it yet
      next = TakeNextLocked();
    }
    ended = TakeEndedLocked();
  }
  if (next != nullptr) Begin(*next);
  End(std::move(ended));
}

UploadRun::Ended UploadRun::TakeEndedLocked() {
  if (set_.open() > 0 || completing_) return {};
  const bool all =
      std::all_of(parts_.begin(), parts_.end(), [](const Part& each) { return each.begun; });
  if (complete_ && !all) {  // no part is left that could make room
    set_.Fail(refusal_.ok() ? Internal("a part of the request was not begun") : refusal_);
  }
  return {std::move(whole_), std::exchange(idle_, nullptr)};
}

void UploadRun::End(Ended ended) {
  if (ended.whole != nullptr) {
    {
      const MutexLock lock(mutex_);
      set_.ApplyTo(*ended.whole);
    }
    hooks_.finish(std::move(ended.whole));
  }
  if (ended.idle != nullptr) ended.idle();
}

}  // namespace attend

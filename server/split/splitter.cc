// SPDX-License-Identifier: Apache-2.0

#include "server/split/splitter.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>
#include <vector>

#include "server/memory/memory_reserve.h"
#include "server/request/part_set.h"
#include "server/split/split_parts.h"

namespace attend {
namespace {

// Whether another device may take what this one refused.
bool MayPassOn(Code code) { return code == Code::kResourceExhausted || code == Code::kUnavailable; }

// The slice's shard, which is also the index of the first device that its part is offered to.
size_t ShardOf(const QuerySlice& slice) { return static_cast<size_t>(slice.shard); }

}  // namespace

// One split request. The splitter keeps it until the last part has ended. Each call keeps it too,
// because it may be the call that ends it. The mutex is never held while anything else is called.
class Splitter::Join final : public Responder, public std::enable_shared_from_this<Join> {
 public:
  struct Part {
    uint64_t id = 0;  // consecutive
    double flops = 0;
  };

  Join(Splitter& splitter, std::unique_ptr<Request> whole, std::vector<SplitDevice> devices,
       std::vector<Part> parts)
      : splitter_(splitter),
        whole_(std::move(whole)),
        slices_(whole_->placement.shards),
        devices_(std::move(devices)),
        parts_(std::move(parts)),
        set_(PartSet::Times::kOfTheLast, std::ssize(parts_) + 1) {
    for (const QuerySlice& slice : slices_) part_devices_.push_back(ShardOf(slice));
  }

  // Pushes all parts. Not OK: no device took the first, and `request` has the whole back.
  Status Start(std::vector<std::unique_ptr<Request>> parts, std::unique_ptr<Request>& request);
  void Cancel();
  void Finish(std::unique_ptr<Request> part) override;

 private:
  Status Push(size_t n, std::unique_ptr<Request>& part);
  void Cancel(size_t n);
  bool Fail(Status status);
  bool failed();
  void CancelParts();
  void Drop(int64_t parts);
  void NameDevicesLocked() ATTEND_REQUIRES(mutex_);
  void End();

  Splitter& splitter_;
  std::unique_ptr<Request> whole_;
  const std::vector<QuerySlice> slices_;
  const std::vector<SplitDevice> devices_;
  const std::vector<Part> parts_;  // in the order of slices_

  Mutex mutex_;
  // For each part, the index in devices_ of the device that has it or is asked next. Changes only
  // in Start.
  std::vector<size_t> part_devices_ ATTEND_GUARDED_BY(mutex_);
  bool starting_ ATTEND_GUARDED_BY(mutex_) = true;
  PartSet set_ ATTEND_GUARDED_BY(mutex_);  // while starting, one more is open
};

Status Splitter::Join::Start(std::vector<std::unique_ptr<Request>> parts,
                             std::unique_ptr<Request>& request) {
  const auto self = shared_from_this();
  const int64_t count = std::ssize(parts_);
  int64_t pushed = 0;
  for (auto& part : parts) {
    if (failed()) break;
    part->responder = this;
    Status status = Push(static_cast<size_t>(pushed), part);
    if (!status.ok()) {
      if (pushed == 0) {
        request = std::move(whole_);
        return status;
      }
      if (Fail(std::move(status))) CancelParts();
      break;
    }
    ++pushed;
    // A cancellation before the part was queued found nothing to cancel.
    if (failed()) Cancel(static_cast<size_t>(pushed - 1));
  }
  {
    const MutexLock lock(mutex_);
    starting_ = false;
  }
  parts.clear();  // frees the blocks of parts that no device took, before the client is told
  Drop(count - pushed + 1);
  return Status();
}

// Pushes the part to its device or, if that has no room or has just been lost, to the next one. The
// devices are equal and the cuts stay the same, so every bit of the answer does too.
Status Splitter::Join::Push(size_t n, std::unique_ptr<Request>& part) {
  Status refused;
  const size_t first = ShardOf(slices_[n]);
  for (size_t tried = 0; tried < devices_.size(); ++tried) {
    const size_t device = (first + tried) % devices_.size();
    const Result<Selection> selection =
        Select(part->attention.problem, devices_[device].info, part->kernel);
    if (!selection.ok()) continue;  // never of the first, for which there is a plan
    {
      const MutexLock lock(mutex_);
      part_devices_[n] = device;
    }
    part->device = devices_[device].index;
    part->selection = *selection;
    Status status = splitter_.hooks_.push(part);
    assert(status.ok() == (part == nullptr) && "taken if and only if OK");
    if (status.ok() || !MayPassOn(status.code())) return status;
    if (refused.ok()) refused = std::move(status);
  }
  return refused;
}

// Drops the part if it is still queued.
void Splitter::Join::Cancel(size_t n) {
  size_t device;
  {
    const MutexLock lock(mutex_);
    device = part_devices_[n];
  }
  splitter_.hooks_.cancel(devices_[device].index, parts_[n].id);
}

void Splitter::Join::Cancel() {
  const auto self = shared_from_this();
  {
    const MutexLock lock(mutex_);
    if (starting_) set_.Fail(Status(Code::kCancelled, "cancelled by the client while queued"));
  }
  CancelParts();
}

void Splitter::Join::Finish(std::unique_ptr<Request> part) {
  const auto self = shared_from_this();
  const size_t n = part->id - parts_.front().id;
  assert(n < parts_.size());
  bool first_failure = false;
  if (part->status.ok()) {
    GatherLse(*part, slices_[n], whole_->attention);
    const MutexLock lock(mutex_);
    set_.Add(*part);
  } else {
    first_failure = Fail(part->status);
  }
  part.reset();  // frees its block before the client is told
  if (first_failure) CancelParts();
  Drop(1);
}

// Returns whether this was the first failure.
bool Splitter::Join::Fail(Status status) {
  const MutexLock lock(mutex_);
  return set_.Fail(std::move(status));
}

bool Splitter::Join::failed() {
  const MutexLock lock(mutex_);
  return set_.failed();
}

void Splitter::Join::CancelParts() {
  for (size_t n = 0; n < parts_.size(); ++n) Cancel(n);
}

void Splitter::Join::Drop(int64_t parts) {
  {
    const MutexLock lock(mutex_);
    set_.Close(parts);
    if (set_.open() > 0) return;
  }
  End();
}

// Records which devices computed the whole, and how much of it. Where there can be only one, it is
// the first part's device.
void Splitter::Join::NameDevicesLocked() {
  whole_->device = devices_[part_devices_.front()].index;
  whole_->device_name.clear();
  for (size_t n = 0; n < parts_.size(); ++n) {
    const SplitDevice& device = devices_[part_devices_[n]];
    auto& all = whole_->device_flops;
    auto found = std::find_if(all.begin(), all.end(),
                              [&](const auto& each) { return each.device == device.index; });
    if (found == all.end()) {
      whole_->device_name += (all.empty() ? "" : "+") + device.info.name;
      found = all.insert(all.end(), {device.index, 0});
    }
    found->flops += parts_[n].flops;
  }
}

void Splitter::Join::End() {
  splitter_.Remove(whole_->id);
  splitter_.metrics_.RecordSplit(slices_.back().shard + 1);
  {
    const MutexLock lock(mutex_);
    NameDevicesLocked();
    set_.ApplyTo(*whole_);
  }
  splitter_.hooks_.finish(std::move(whole_));
}

Splitter::Splitter(HostPool& pool, Metrics& metrics, Hooks hooks)
    : pool_(pool), metrics_(metrics), hooks_(std::move(hooks)) {}

Splitter::~Splitter() { assert(joins_.empty() && "a part outlived the splitter"); }

std::optional<Status> Splitter::Submit(std::unique_ptr<Request>& request,
                                       std::vector<SplitDevice> devices) {
  const OnNoMemory wait(OnNoMemory::kWait);  // parts are queued one by one
  const std::vector<QuerySlice>& slices = request->placement.shards;
  Result<std::vector<std::unique_ptr<Request>>> parts = MakeParts(*request, slices, pool_);
  if (!parts.ok()) return std::nullopt;
  uint64_t part_id = hooks_.take_ids(parts->size());
  std::vector<Join::Part> places;
  for (size_t n = 0; n < slices.size(); ++n) {
    Request& part = *(*parts)[n];
    const size_t device = ShardOf(slices[n]);
    const Result<Selection> selection =
        Select(part.attention.problem, devices[device].info, part.kernel);
    if (!selection.ok()) return std::nullopt;
    if (n == 0) request->selection = *selection;
    part.id = part_id++;
    places.push_back({part.id, part.flops});
  }
  const uint64_t id = request->id;
  std::shared_ptr<Join> join;
  {
    const MutexLock lock(mutex_);
    join = std::make_shared<Join>(*this, std::move(request), std::move(devices), std::move(places));
    joins_.emplace(id, join);
  }
  Status status = join->Start(std::move(*parts), request);
  assert(status.ok() == (request == nullptr) && "taken if and only if OK");
  if (!status.ok()) Remove(id);
  return status;
}

bool Splitter::Cancel(uint64_t id) {
  std::shared_ptr<Join> join;
  {
    const MutexLock lock(mutex_);
    const auto found = joins_.find(id);
    if (found == joins_.end()) return false;
    join = found->second;
  }
  join->Cancel();
  return true;
}

void Splitter::Remove(uint64_t id) {
  const MutexLock lock(mutex_);
  joins_.erase(id);
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/split_join.h"

#include <cassert>
#include <string>
#include <utility>
#include <vector>

#include "server/split_parts.h"
#include "server/split_plan.h"

namespace attend {
namespace {

// The ids of parts: never those of requests, which count from 1.
constexpr uint64_t kFirstPartId = uint64_t{1} << 63;

// Who computes the whole, and how much of it. The first device stands for it where only one can.
void NameDevices(std::span<const SplitDevice> devices, std::span<const SplitPiece> pieces,
                 std::span<const std::unique_ptr<Request>> parts, Request* whole) {
  whole->device = parts.front()->device;
  whole->selection = parts.front()->selection;
  whole->device_name.clear();
  whole->device_flops.clear();
  for (size_t n = 0; n < pieces.size(); ++n) {
    const SplitDevice& device = devices[pieces[n].share];
    if (n == 0 || pieces[n].share != pieces[n - 1].share) {
      whole->device_name += (n == 0 ? "" : "+") + device.info.name;
      whole->device_flops.push_back({device.index, 0});
    }
    whole->device_flops.back().flops += parts[n]->flops;
  }
}

}  // namespace

// One split request. The splitter keeps it until the last part has ended; whoever calls in keeps it
// for the length of the call, as that may be the one that ends it. The mutex is never held while
// anything else is called.
class Splitter::Join final : public Responder, public std::enable_shared_from_this<Join> {
 public:
  struct Part {
    int device = 0;
    uint64_t id = 0;  // consecutive
  };

  Join(Splitter& splitter, std::unique_ptr<Request> whole, std::vector<SplitPiece> pieces,
       std::vector<Part> parts)
      : splitter_(splitter),
        whole_(std::move(whole)),
        pieces_(std::move(pieces)),
        parts_(std::move(parts)),
        open_(std::ssize(parts_) + 1) {}

  // Pushes all parts. Not OK: the first was refused, and the whole is in `request` again.
  Status Start(std::vector<std::unique_ptr<Request>> parts, std::unique_ptr<Request>& request);
  void Cancel();
  void Finish(std::unique_ptr<Request> part) override;

 private:
  bool Fail(Status status);
  bool failed();
  void CancelParts();
  void Drop(int64_t parts);
  void End();

  Splitter& splitter_;
  std::unique_ptr<Request> whole_;
  const std::vector<SplitPiece> pieces_;
  const std::vector<Part> parts_;  // as the pieces

  std::mutex mutex_;
  bool starting_ = true;
  int64_t open_;    // parts that have not ended; while starting, one more
  Status failure_;  // the first; OK while all is well
  struct {
    TimePoint enqueued, started, completed;
    int64_t batch_requests = 0, copy_in_ns = 0, kernel_ns = 0, copy_out_ns = 0;
  } last_;  // the part that ended last, by its device
};

Status Splitter::Join::Start(std::vector<std::unique_ptr<Request>> parts,
                             std::unique_ptr<Request>& request) {
  const auto self = shared_from_this();
  const int64_t count = std::ssize(parts_);
  int64_t pushed = 0;
  for (auto& part : parts) {
    if (failed()) break;
    part->responder = this;
    Status status = splitter_.hooks_.push(part);
    if (!status.ok()) {
      if (pushed == 0) {
        request = std::move(whole_);
        return status;
      }
      if (Fail(std::move(status))) CancelParts();
      break;
    }
    ++pushed;
    // A cancellation that came before the part was queued found nothing to cancel.
    if (failed()) splitter_.hooks_.cancel(parts_[pushed - 1].device, parts_[pushed - 1].id);
  }
  {
    const std::lock_guard lock(mutex_);
    starting_ = false;
  }
  Drop(count - pushed + 1);
  return Status();
}

void Splitter::Join::Cancel() {
  const auto self = shared_from_this();
  {
    const std::lock_guard lock(mutex_);
    if (starting_ && failure_.ok()) {
      failure_ = Status(Code::kCancelled, "cancelled by the client while queued");
    }
  }
  CancelParts();
}

void Splitter::Join::Finish(std::unique_ptr<Request> part) {
  const auto self = shared_from_this();
  const size_t n = part->id - parts_.front().id;
  assert(n < parts_.size());
  bool first_failure = false;
  if (part->status.ok()) {
    GatherLse(*part, pieces_[n], whole_->attention);
    const std::lock_guard lock(mutex_);
    if (part->completed >= last_.completed) {
      last_ = {part->enqueued,   part->started,   part->completed,  part->batch_requests,
               part->copy_in_ns, part->kernel_ns, part->copy_out_ns};
    }
  } else {
    first_failure = Fail(part->status);
  }
  part.reset();  // its block before the client hears of the end
  if (first_failure) CancelParts();
  Drop(1);
}

// Whether this was the first.
bool Splitter::Join::Fail(Status status) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return false;
  failure_ = std::move(status);
  return true;
}

bool Splitter::Join::failed() {
  const std::lock_guard lock(mutex_);
  return !failure_.ok();
}

void Splitter::Join::CancelParts() {
  for (const Part& part : parts_) splitter_.hooks_.cancel(part.device, part.id);
}

void Splitter::Join::Drop(int64_t parts) {
  {
    const std::lock_guard lock(mutex_);
    open_ -= parts;
    assert(open_ >= 0);
    if (open_ > 0) return;
  }
  End();
}

void Splitter::Join::End() {
  splitter_.Remove(whole_->id);
  splitter_.metrics_.RecordSplit(static_cast<int>(whole_->device_flops.size()));
  whole_->status = failure_;
  whole_->enqueued = last_.enqueued;
  whole_->started = last_.started;
  whole_->completed = last_.completed;
  whole_->batch_requests = last_.batch_requests;
  whole_->copy_in_ns = last_.copy_in_ns;
  whole_->kernel_ns = last_.kernel_ns;
  whole_->copy_out_ns = last_.copy_out_ns;
  splitter_.hooks_.finish(std::move(whole_));
}

Splitter::Splitter(double flops_min, HostPool& pool, Metrics& metrics, Hooks hooks)
    : flops_min_(flops_min),
      pool_(pool),
      metrics_(metrics),
      hooks_(std::move(hooks)),
      next_id_(kFirstPartId) {}

Splitter::~Splitter() { assert(joins_.empty() && "a part outlived the splitter"); }

std::optional<Status> Splitter::Submit(std::unique_ptr<Request>& request,
                                       std::span<const SplitDevice> devices) {
  if (flops_min_ <= 0 || request->flops <= flops_min_ || devices.size() < 2) return std::nullopt;
  std::vector<SplitPiece> pieces = PlanSplit(request->attention, static_cast<int>(devices.size()));
  if (pieces.empty()) return std::nullopt;
  Result<std::vector<std::unique_ptr<Request>>> parts = MakeParts(*request, pieces, pool_);
  if (!parts.ok()) return std::nullopt;
  for (size_t n = 0; n < pieces.size(); ++n) {
    const SplitDevice& device = devices[pieces[n].share];
    Request& part = *(*parts)[n];
    const Result<Selection> selection = Select(part.attention.problem, device.info, part.kernel);
    if (!selection.ok()) return std::nullopt;
    part.device = device.index;
    part.selection = *selection;
  }
  NameDevices(devices, pieces, *parts, request.get());
  const uint64_t id = request->id;
  std::shared_ptr<Join> join;
  {
    const std::lock_guard lock(mutex_);
    std::vector<Join::Part> places;
    for (const auto& part : *parts) {
      part->id = next_id_++;
      places.push_back({part->device, part->id});
    }
    join = std::make_shared<Join>(*this, std::move(request), std::move(pieces), std::move(places));
    joins_.emplace(id, join);
  }
  Status status = join->Start(std::move(*parts), request);
  if (!status.ok()) {
    Remove(id);
    request->device_flops.clear();
  }
  return status;
}

bool Splitter::Cancel(uint64_t id) {
  std::shared_ptr<Join> join;
  {
    const std::lock_guard lock(mutex_);
    const auto found = joins_.find(id);
    if (found == joins_.end()) return false;
    join = found->second;
  }
  join->Cancel();
  return true;
}

void Splitter::Remove(uint64_t id) {
  const std::lock_guard lock(mutex_);
  joins_.erase(id);
}

}  // namespace attend

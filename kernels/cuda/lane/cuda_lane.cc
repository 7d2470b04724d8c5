// SPDX-License-Identifier: Apache-2.0
//
// Submit enqueues a batch's small items as a whole: await the items' events, gather inputs, append
// keys, launch kernels, scatter outputs, with an event after each phase; then it hands the last
// event to the poller or to Poll. Large items run part after part: the first kAhead parts are
// enqueued, and each completed part enqueues the next. Errors are per item: a failed shared launch
// is retried item by item; a lost device fails all of them.

#include "kernels/cuda/lane/cuda_lane.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "kernels/cuda/lane/cut_plan.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/runtime/cuda_event.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

// Page-locked bytes for lists of attentions: initial size, and the most that a lane keeps. Longer
// lists (a million sequences) use pageable memory.
constexpr int64_t kListBytes = int64_t{1} << 20;
constexpr int64_t kListBytesMax = int64_t{16} << 20;

}  // namespace

Result<std::unique_ptr<Lane>> CudaLane::Make(const LaneContext& context,
                                             const LaneOptions& options) {
  std::unique_ptr<CudaLane> lane(new CudaLane(context));
  ATTEND_RETURN_IF_ERROR(lane->Open(options));
  return std::unique_ptr<Lane>(std::move(lane));
}

Status CudaLane::Open(const LaneOptions& options) {
  const std::string where = "making a lane on " + context_.device.name;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(context_.device.index), where));
  int least = 0, greatest = 0;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), where));
  ATTEND_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), where));
  for (cudaEvent_t& event : events_)
    ATTEND_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&event), where));
  ATTEND_RETURN_IF_ERROR(pipeline_.Open(where));
  ATTEND_RETURN_IF_ERROR(ToStatus(lists_.Reset(kListBytes), where));
  memory_.Use(stream_, options.workspace_bytes);
  cudaError_t error = cudaSuccess;
  ATTEND_RETURN_IF_ERROR(memory_.Reserve(options.workspace_bytes, &error));
  return ToStatus(cudaStreamSynchronize(stream_), where);  // the driver's setup, before any batch
}

CudaLane::~CudaLane() {
  {
    const MutexLock lock(mutex_);
    while (busy_) idle_.Wait(mutex_);
  }
  (void)cudaSetDevice(context_.device.index);
  memory_.Release();
  for (cudaEvent_t event : events_) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

std::vector<AttentionSlice> CudaLane::PartsOf(const WorkItem& item) const {
  if (item.gradients) return {};
  const KernelId kernel = item.selection.kernel;
  const CutBounds& bounds = context_.tuning.cut;
  if (!item.gathered.empty()) return {};
  std::vector<AttentionSlice> parts = PlanParts(item.attention, kernel, bounds);
  if (parts.empty() || !CanMoveInParts(item)) return {};
  return TensorsAreInPlace(item) ? JoinParts(item.attention, kernel, bounds, parts) : parts;
}

Status CudaLane::Prepare(std::span<const WorkItem> items, Batch* batch) {
  for (const WorkItem& item : items) {
    const KernelId kernel = item.selection.kernel;
    if (Kernels()[static_cast<size_t>(kernel)].device != DeviceKind::kCuda) {
      return Unimplemented("kernel " + std::string(KernelName(kernel)) + " does not run on " +
                           context_.device.name);
    }
    for (const DeviceEvent* event : item.after) {
      if (event == nullptr || dynamic_cast<const CudaEvent*>(event) != nullptr) continue;
      return InvalidArgument("an item waits for an event that does not belong to " +
                             context_.device.name);
    }
    ATTEND_RETURN_IF_ERROR(CheckInPlace(item));
    ATTEND_RETURN_IF_ERROR(CheckGathered(item));
    batch->cuts.push_back(PartsOf(item));
  }
  Result<BatchLayout> layout = LayOut(items, context_.device.workspace_bytes_max, batch->cuts);
  if (!layout.ok()) return layout.status();
  batch->layout = *std::move(layout);
  cudaError_t error = cudaSuccess;
  const Status reserved = memory_.Reserve(batch->layout.bytes, &error);
  if (IsSticky(error)) context_.poller.ReportLoss(error);
  ATTEND_RETURN_IF_ERROR(reserved);
  for (size_t n = 0; n < items.size(); ++n) {
    batch->places.push_back(PlaceIn(memory_.data(), items[n], batch->layout.items[n]));
    Result<Attention> moved = Rebase(items[n], batch->places[n]);
    if (!moved.ok()) return moved.status();
    batch->attentions.push_back(*std::move(moved));
    if (items[n].gradients) {
      const Result<Gradients> gradients = RebaseGradients(items[n], batch->places[n]);
      if (!gradients.ok()) return gradients.status();
      BackwardItem backward = ToBackward(items[n]);
      backward.attention = batch->attentions.back();
      backward.gradients = *gradients;
      batch->backward.push_back({n, backward});
    }
    if (items[n].append.rows == 0) continue;
    Result<KeyAppend> append = RebaseAppend(items[n], batch->places[n]);
    if (!append.ok()) return append.status();
    batch->appends.push_back({batch->attentions.back(), *append});
    batch->appending.push_back(n);
  }
  batch->items.assign(items.begin(), items.end());
  batch->statuses.resize(items.size());
  // Twice, because a failed launch is retried item by item. Without memory, lists are pageable.
  const int64_t list_bytes = std::min(batch->layout.list_bytes, kListBytesMax / 2) * 2;
  if (lists_.Reset(list_bytes) != cudaSuccess) (void)lists_.Reset(0);
  PrepareRun(batch);
  return Status();
}

void CudaLane::PrepareRun(Batch* batch) {
  std::vector<CutItem> cut;
  for (size_t n = 0; n < batch->items.size(); ++n) {
    if (batch->IsSmall(n)) continue;
    cut.push_back({&batch->items[n],
                   &batch->places[n],
                   &batch->statuses[n],
                   {batch->items[n].attention, batch->attentions[n]},
                   batch->cuts[n]});
  }
  if (cut.empty()) return;
  const CutWorkspace workspace = {memory_.data() + batch->layout.workspace,
                                  batch->layout.workspace_bytes, OptionsOf(true)};
  const auto note = [this](cudaError_t error, const char* where, Status* status) {
    return Note(error, where, status);
  };
  batch->run.emplace(pipeline_, std::move(cut), workspace, note, context_.timeline);
}

LaunchOptions CudaLane::OptionsOf(bool parts) {
  LaunchOptions options;
  options.lists = &lists_;
  options.multiprocessors_free = parts ? context_.tuning.multiprocessors_free : 0;
  options.may_begin_early = !parts;
  return options;
}

Status CudaLane::Submit(std::span<const WorkItem> items, Done done) {
  return Start(items, std::move(done), /*polled=*/false);
}

Status CudaLane::SubmitPolled(std::span<const WorkItem> items, Done done) {
  return Start(items, std::move(done), /*polled=*/true);
}

void CudaLane::Poll(std::chrono::nanoseconds at_most) {
  std::optional<PolledBatch> mine;
  {
    const MutexLock lock(mutex_);
    if (polled_ && polled_->submitter == std::this_thread::get_id()) mine.swap(polled_);
  }
  if (!mine) return;
  const auto until = std::chrono::steady_clock::now() + at_most;  // a device runs in real time
  do {
    const cudaError_t error = context_.poller.StateOf(events_[kCopiedOut], mine->recorded);
    if (error != cudaErrorNotReady) return Finish(mine->batch.get(), error);
  } while (std::chrono::steady_clock::now() < until);
  mine->batch->polled = false;
  AwaitEnd(mine->batch, kCopiedOut, mine->recorded);
}

Status CudaLane::Start(std::span<const WorkItem> items, Done done, bool polled) {
  const DeviceInfo& device = context_.device;
  if (context_.poller.device_lost()) return Unavailable("device " + device.name + " is lost");
  {
    const MutexLock lock(mutex_);
    if (busy_) return Status(Code::kFailedPrecondition, "the lane's last batch has not ended");
  }
  const cudaError_t error = cudaSetDevice(device.index);
  if (error != cudaSuccess) return Unavailable(ErrorText(error, "Submit on " + device.name));
  auto batch = std::make_shared<Batch>();
  const Status prepared = Prepare(items, batch.get());
  if (!prepared.ok()) {
    // If the loss shows only now, this batch did not cause it.
    if (context_.poller.device_lost()) return Unavailable("device " + device.name + " is lost");
    return prepared;
  }
  batch->done = std::move(done);
  batch->polled = polled && !batch->run;
  {
    const MutexLock lock(mutex_);
    busy_ = true;
  }
  Await(batch.get());
  const cudaError_t begun = cudaEventRecord(events_[kBegin], stream_);
  CopyIn(batch.get());
  (void)cudaEventRecord(events_[kCopiedIn], stream_);
  Append(batch.get());
  Compute(batch.get());
  const cudaError_t computed = cudaEventRecord(events_[kComputed], stream_);
  CopyOut(batch.get());
  const cudaError_t recorded = cudaEventRecord(events_[kCopiedOut], stream_);
  if (!batch->run) {
    AwaitEnd(batch, kCopiedOut, recorded);
  } else if (begun != cudaSuccess || computed != cudaSuccess) {
    AwaitEnd(batch, kCopiedOut, begun != cudaSuccess ? begun : computed);
  } else {
    StartParts(batch);
  }
  return Status();
}

bool CudaLane::Note(cudaError_t error, const char* where, Status* status) {
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError();
  if (IsSticky(error)) context_.poller.ReportLoss(error);
  *status = Internal(ErrorText(error, std::string(where) + " on " + context_.device.name));
  return false;
}

SpanCopier::Fail CudaLane::NoteCopies(const char* where, Batch* batch) {
  return [this, where, batch](size_t item, cudaError_t error) {
    Note(error, where, &batch->statuses[item]);
  };
}

void CudaLane::Await(Batch* batch) {
  for (size_t n = 0; n < batch->items.size(); ++n) {
    for (const DeviceEvent* event : batch->items[n].after) {
      if (event == nullptr) continue;
      batch->awaits = true;
      Note(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent*>(event)->get()),
           "waiting for what comes before", &batch->statuses[n]);
    }
  }
}

void CudaLane::CopyIn(Batch* batch) {
  SpanCopier copier(context_.pinned, context_.tuning, cudaMemcpyHostToDevice);
  for (size_t n = 0; n < batch->items.size(); ++n) {
    if (!batch->IsSmall(n)) continue;
    std::vector<InputCopy> copies;
    AddInputCopies(batch->items[n], batch->places[n], &copies);
    for (const InputCopy& copy : copies) {
      if (copy.mapped) {
        copier.AddMapped({copy.to, copy.from, copy.bytes}, n);
      } else {
        copier.Add({const_cast<char*>(copy.from), copy.bytes}, copy.to, n);
      }
    }
  }
  copier.Enqueue(stream_, NoteCopies("copy in", batch));
  ClearOutputs(batch);
  PoisonInPlace(batch);
}

// Bytes that no kernel writes must not return another batch's data. Adjacent outputs are cleared
// together.
void CudaLane::ClearOutputs(Batch* batch) {
  char* begin = nullptr;
  char* end = nullptr;
  int value = 0;
  std::vector<size_t> owners;
  const auto clear = [&] {
    const cudaError_t error =
        owners.empty() ? cudaSuccess
                       : cudaMemsetAsync(begin, value, static_cast<size_t>(end - begin), stream_);
    for (const size_t n : owners) Note(error, "clearing the output", &batch->statuses[n]);
    owners.clear();
  };
  for (size_t n = 0; n < batch->items.size(); ++n) {
    const WorkItem& item = batch->items[n];
    if (!batch->IsSmall(n) || (!item.poison_output && OutputIsDense(item))) continue;
    const int wanted = item.poison_output ? kPoison : 0;
    for (int i = 0; i < item.outputs.size(); ++i) {
      char* const place = batch->places[n].outputs[i];
      if (owners.empty() || wanted != value || place - end >= 2 * kLayoutAlignment) {
        clear();
        begin = place;
        value = wanted;
      }
      end = place + item.outputs[i].bytes;
      owners.push_back(n);
    }
  }
  clear();
}

void CudaLane::PoisonInPlace(Batch* batch) {
  for (size_t n = 0; n < batch->items.size(); ++n) {
    const WorkItem& item = batch->items[n];
    Status* const status = &batch->statuses[n];
    // A backward pass writes every row of its gradients.
    if (!batch->IsSmall(n) || !item.poison_output || item.gradients || !status->ok()) continue;
    const Result<std::vector<ByteRuns>> outputs = OutputsInPlace(item);
    if (!outputs.ok()) {
      *status = outputs.status();
      continue;
    }
    for (const ByteRuns& runs : *outputs) {
      Note(EnqueueFill(runs, kPoison, stream_), "clearing the output", status);
    }
  }
}

// No other item of the batch reads the rows that an item appends, as they are beyond the others'
// length in that page: the only ordering needed is before the kernels.
void CudaLane::Append(Batch* batch) {
  if (batch->appends.empty()) return;
  const cudaError_t error = LaunchAppend(batch->appends, stream_);
  for (const size_t n : batch->appending) Note(error, "appending keys", &batch->statuses[n]);
}

// Items that are alike share launches.
void CudaLane::ComputeGradients(Batch* batch) {
  std::vector<BackwardItem> items;
  std::vector<Status*> statuses;
  for (const auto& [n, item] : batch->backward) {
    if (!batch->statuses[n].ok()) continue;
    items.push_back(item);
    statuses.push_back(&batch->statuses[n]);
  }
  if (items.empty()) return;
  char* const workspace = memory_.data() + batch->layout.workspace + kTileQueueBytes;
  const int64_t bytes = batch->layout.workspace_bytes - kTileQueueBytes;
  const Status status = LaunchBackward(items, workspace, bytes, stream_);
  if (status.ok()) return;
  const cudaError_t error = cudaStreamQuery(stream_);  // every call reports a lost device
  const bool lost = IsSticky(error);
  if (lost) context_.poller.ReportLoss(error);
  // As in Compute: launch each alone, so that only the one that failed fails.
  for (size_t n = 0; n < items.size(); ++n) {
    *statuses[n] = lost ? status : LaunchBackward({&items[n], 1}, workspace, bytes, stream_);
  }
}

// One ragged launch per kind of kernel in the batch.
void CudaLane::Compute(Batch* batch) {
  std::vector<LaunchItem> launches;
  for (size_t n = 0; n < batch->items.size(); ++n) {
    if (!batch->IsSmall(n) || !batch->statuses[n].ok() || batch->items[n].gradients) continue;
    launches.push_back(ToLaunch(batch->items[n]));
    launches.back().attention = batch->attentions[n];
  }
  ComputeGradients(batch);
  char* const workspace = memory_.data() + batch->layout.workspace;
  const int64_t bytes = batch->layout.workspace_bytes;
  LaunchOptions options = OptionsOf(false);
  // A kernel that starts early waits for earlier work on its own stream, but not for other streams'
  // events.
  options.may_begin_early &= !batch->awaits;
  const Status status = LaunchBatch(launches, workspace, bytes, stream_, options);
  if (status.ok()) return;
  const cudaError_t error = cudaStreamQuery(stream_);  // every call reports a lost device
  const bool lost = IsSticky(error);
  if (lost) context_.poller.ReportLoss(error);
  // It is unknown which item failed: launch each alone, so that only that one fails. Items that had
  // already started compute the same result again.
  size_t next = 0;
  for (size_t n = 0; n < batch->items.size(); ++n) {
    Status& each = batch->statuses[n];
    if (!batch->IsSmall(n) || !each.ok() || batch->items[n].gradients) continue;
    const std::span<const LaunchItem> alone(&launches[next++], 1);
    each = lost ? status : LaunchBatch(alone, workspace, bytes, stream_, options);
  }
}

void CudaLane::CopyOut(Batch* batch) {
  SpanCopier copier(context_.pinned, context_.tuning, cudaMemcpyDeviceToHost);
  for (size_t n = 0; n < batch->items.size(); ++n) {
    if (!batch->IsSmall(n) || !batch->statuses[n].ok()) continue;
    const SpanList& spans = batch->items[n].outputs;
    for (int i = 0; i < spans.size(); ++i) copier.Add(spans[i], batch->places[n].outputs[i], n);
  }
  copier.Enqueue(stream_, NoteCopies("copy out", batch));
}

// The lane's memory is available from kBegin on; small items and parts share the kernels'
// workspace.
void CudaLane::StartParts(const BatchPointer& batch) {
  cudaError_t error = pipeline_.WaitFor(events_[kBegin]);
  if (error == cudaSuccess) {
    error = cudaStreamWaitEvent(pipeline_.stream(PartPipeline::kKernel), events_[kComputed]);
  }
  if (error != cudaSuccess) return PartEnded(batch, error);
  for (int n = 0; n < PartPipeline::kAhead && batch->run->HasNext(); ++n) batch->run->StartNext();
  AwaitPart(batch);
}

void CudaLane::AwaitPart(const BatchPointer& batch) {
  if (batch->run->HasNext()) {
    context_.poller.Add(batch->run->oldest(), batch->run->oldest_recorded(),
                        [this, batch](cudaError_t outcome) { PartEnded(batch, outcome); });
    return;
  }
  cudaError_t error = pipeline_.Join(stream_);
  if (error == cudaSuccess) error = cudaEventRecord(events_[kEnd], stream_);
  AwaitEnd(batch, kEnd, error);
}

void CudaLane::PartEnded(const BatchPointer& batch, cudaError_t error) {
  if (error == cudaSuccess) {
    batch->run->CollectOldest();
    batch->run->StartNext();
  } else {
    if (IsSticky(error)) context_.poller.ReportLoss(error);
    batch->run->Abandon(Internal(ErrorText(error, "a part of an item on " + context_.device.name)));
  }
  AwaitPart(batch);
}

void CudaLane::AwaitEnd(const BatchPointer& batch, Mark last, cudaError_t recorded) {
  if (batch->polled) {
    const MutexLock lock(mutex_);
    polled_ = PolledBatch{batch, recorded, std::this_thread::get_id()};
    return;
  }
  context_.poller.Add(events_[last], recorded,
                      [this, batch](cudaError_t outcome) { Finish(batch.get(), outcome); });
}

void CudaLane::ReadTimes(Batch* batch, BatchOutcome* outcome) {
  outcome->copy_in_ns = ElapsedNs(events_[kBegin], events_[kCopiedIn]);
  outcome->kernel_ns = ElapsedNs(events_[kCopiedIn], events_[kComputed]);
  outcome->copy_out_ns = ElapsedNs(events_[kComputed], events_[kCopiedOut]);
  outcome->span_ns = ElapsedNs(events_[kBegin], events_[batch->run ? kEnd : kCopiedOut]);
  if (context_.timeline) {
    context_.timeline(PartPipeline::kIn, -1, events_[kBegin], events_[kCopiedIn]);
    context_.timeline(PartPipeline::kKernel, -1, events_[kCopiedIn], events_[kComputed]);
    context_.timeline(PartPipeline::kOut, -1, events_[kComputed], events_[kCopiedOut]);
  }
  if (!batch->run) return;
  batch->run->CollectAll();
  outcome->copy_in_ns += batch->run->busy_ns(PartPipeline::kIn);
  outcome->kernel_ns += batch->run->busy_ns(PartPipeline::kKernel);
  outcome->copy_out_ns += batch->run->busy_ns(PartPipeline::kOut);
  outcome->cut_parts = batch->run->parts();
}

void CudaLane::Finish(Batch* batch, cudaError_t error) {
  BatchOutcome outcome;
  outcome.device_lost = context_.poller.device_lost();
  if (error == cudaSuccess) {
    ReadTimes(batch, &outcome);
  } else {
    // The event could not be recorded, but enqueued work still uses the caller's memory.
    if (!outcome.device_lost) {
      (void)cudaStreamSynchronize(stream_);
      pipeline_.Synchronize();
    }
    for (Status& status : batch->statuses) {
      if (status.ok()) status = Internal(ErrorText(error, "a batch on " + context_.device.name));
    }
  }
  outcome.statuses = std::move(batch->statuses);
  Done done = std::move(batch->done);
  {
    const MutexLock lock(mutex_);
    busy_ = false;
    idle_.NotifyAll();  // under the lock: the lane may be destroyed right after
  }
  done(std::move(outcome));
}

}  // namespace attend::cuda

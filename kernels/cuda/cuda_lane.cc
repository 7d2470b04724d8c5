// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/cuda_lane.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/launch.h"

namespace attend::cuda {
namespace {

constexpr int64_t kGrowthBytes = int64_t{16} << 20;  // memory is a multiple of this
constexpr int kPoison = 0xff;                        // NaN in every dtype

int64_t RoundUp(int64_t bytes, int64_t unit) {
  return bytes > INT64_MAX - unit ? bytes : (bytes + unit - 1) / unit * unit;
}

}  // namespace

Result<std::unique_ptr<Lane>> CudaLane::Make(const DeviceInfo& device, CompletionPoller& poller,
                                             const LaneOptions& options) {
  std::unique_ptr<CudaLane> lane(new CudaLane(device, poller));
  ATTEND_RETURN_IF_ERROR(lane->Open(options));
  return std::unique_ptr<Lane>(std::move(lane));
}

Status CudaLane::Open(const LaneOptions& options) {
  const std::string where = "making a lane on " + device_.name;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaSetDevice(device_.index), where));
  ATTEND_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), where));
  for (cudaEvent_t& event : events_)
    ATTEND_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&event), where));
  int pools = 0;
  ATTEND_RETURN_IF_ERROR(ToStatus(
      cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device_.index), where));
  has_pools_ = pools != 0;
  return Reserve(options.workspace_bytes);
}

CudaLane::~CudaLane() {
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return !busy_; });
  }
  (void)cudaSetDevice(device_.index);
  FreeMemory();
  for (cudaEvent_t event : events_) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

cudaError_t CudaLane::AllocateMemory(int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = has_pools_
                                ? cudaMallocAsync(&memory, static_cast<size_t>(bytes), stream_)
                                : cudaMalloc(&memory, static_cast<size_t>(bytes));
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return error;
  }
  memory_ = static_cast<char*>(memory);
  memory_bytes_ = bytes;
  // The tile queue at the head of the workspace, which lies first.
  const cudaError_t cleared =
      cudaMemsetAsync(memory_, 0, static_cast<size_t>(kTileQueueBytes), stream_);
  if (cleared != cudaSuccess) FreeMemory();
  return cleared;
}

void CudaLane::FreeMemory() {
  if (memory_ == nullptr) return;
  if (has_pools_) {
    (void)cudaFreeAsync(memory_, stream_);
    // The lane is idle, so this waits for nothing; the pool gives memory back at a synchronisation.
    (void)cudaStreamSynchronize(stream_);
  } else {
    (void)cudaFree(memory_);
  }
  memory_ = nullptr;
  memory_bytes_ = 0;
}

Status CudaLane::Reserve(int64_t bytes) {
  if (bytes <= memory_bytes_) return Status();
  if (bytes > device_.memory_bytes) {
    return ResourceExhausted("the batch needs " + std::to_string(bytes) + " bytes on " +
                             device_.name + ", which has " + std::to_string(device_.memory_bytes));
  }
  const int64_t before = memory_bytes_;
  FreeMemory();  // first, or old and new would have to fit together
  const cudaError_t error = AllocateMemory(RoundUp(bytes, kGrowthBytes));
  if (error == cudaSuccess) return Status();
  if (before > 0) (void)AllocateMemory(before);
  if (IsSticky(error)) poller_.ReportLoss(error);
  return ToStatus(error, "allocating " + std::to_string(bytes) + " bytes on " + device_.name);
}

Status CudaLane::Prepare(std::span<const WorkItem> items, Batch* batch) {
  for (const WorkItem& item : items) {
    const KernelId kernel = item.selection.kernel;
    if (Kernels()[static_cast<size_t>(kernel)].device != DeviceKind::kCuda) {
      return Unimplemented("kernel " + std::string(KernelName(kernel)) + " does not run on " +
                           device_.name);
    }
  }
  Result<BatchLayout> layout = LayOut(items, device_.workspace_bytes_max);
  if (!layout.ok()) return layout.status();
  batch->layout = *std::move(layout);
  ATTEND_RETURN_IF_ERROR(Reserve(batch->layout.bytes));
  for (size_t n = 0; n < items.size(); ++n) {
    batch->places.push_back(PlaceIn(memory_, items[n], batch->layout.items[n]));
    Result<Attention> moved = Rebase(items[n], batch->places[n]);
    if (!moved.ok()) return moved.status();
    batch->attentions.push_back(*std::move(moved));
  }
  batch->items.assign(items.begin(), items.end());
  batch->statuses.resize(items.size());
  return Status();
}

Status CudaLane::Submit(std::span<const WorkItem> items, Done done) {
  if (poller_.device_lost()) return Unavailable("device " + device_.name + " is lost");
  {
    std::lock_guard lock(mutex_);
    if (busy_) return Status(Code::kFailedPrecondition, "the lane's last batch has not ended");
  }
  const cudaError_t error = cudaSetDevice(device_.index);
  if (error != cudaSuccess) return Unavailable(ErrorText(error, "Submit on " + device_.name));
  auto batch = std::make_shared<Batch>();
  ATTEND_RETURN_IF_ERROR(Prepare(items, batch.get()));
  batch->done = std::move(done);
  {
    std::lock_guard lock(mutex_);
    busy_ = true;
  }
  (void)cudaEventRecord(events_[kBegin], stream_);
  CopyIn(batch.get());
  (void)cudaEventRecord(events_[kCopiedIn], stream_);
  Compute(batch.get());
  (void)cudaEventRecord(events_[kComputed], stream_);
  CopyOut(batch.get());
  const cudaError_t recorded = cudaEventRecord(events_[kCopiedOut], stream_);
  poller_.Add(events_[kCopiedOut], recorded,
              [this, batch](cudaError_t outcome) { Finish(batch.get(), outcome); });
  return Status();
}

bool CudaLane::Note(cudaError_t error, const char* where, Status* status) {
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError();
  if (IsSticky(error)) poller_.ReportLoss(error);
  *status = Internal(ErrorText(error, std::string(where) + " on " + device_.name));
  return false;
}

void CudaLane::CopyIn(Batch* batch) {
  for (size_t n = 0; n < batch->items.size(); ++n) {
    const WorkItem& item = batch->items[n];
    const ItemPlace& place = batch->places[n];
    Status* status = &batch->statuses[n];
    for (int i = 0; i < item.inputs.size() && status->ok(); ++i) {
      Note(cudaMemcpyAsync(place.inputs[i], item.inputs[i].data,
                           static_cast<size_t>(item.inputs[i].bytes), cudaMemcpyHostToDevice,
                           stream_),
           "copy in", status);
    }
    // Bytes that no kernel writes must not bring back what another batch left in this memory.
    if (!item.poison_output && OutputIsDense(item)) continue;
    for (int i = 0; i < item.outputs.size() && status->ok(); ++i) {
      Note(cudaMemsetAsync(place.outputs[i], item.poison_output ? kPoison : 0,
                           static_cast<size_t>(item.outputs[i].bytes), stream_),
           "clearing the output", status);
    }
  }
}

// One ragged launch for each kind of kernel in the batch.
void CudaLane::Compute(Batch* batch) {
  std::vector<LaunchItem> launches;
  for (size_t n = 0; n < batch->items.size(); ++n) {
    if (!batch->statuses[n].ok()) continue;
    launches.push_back(ToLaunch(batch->items[n]));
    launches.back().attention = batch->attentions[n];
  }
  const Status status = LaunchBatch(launches, memory_ + batch->layout.workspace,
                                    batch->layout.workspace_bytes, stream_);
  if (status.ok()) return;
  const cudaError_t error = cudaStreamQuery(stream_);  // that a device is lost, every call says
  const bool lost = IsSticky(error);
  if (lost) poller_.ReportLoss(error);
  // Which item it was cannot be told: each alone, so that only that one fails. Those that had been
  // started compute the same again.
  size_t next = 0;
  for (Status& each : batch->statuses) {
    if (!each.ok()) continue;
    const std::span<const LaunchItem> alone(&launches[next++], 1);
    each = lost ? status
                : LaunchBatch(alone, memory_ + batch->layout.workspace,
                              batch->layout.workspace_bytes, stream_);
  }
}

void CudaLane::CopyOut(Batch* batch) {
  for (size_t n = 0; n < batch->items.size(); ++n) {
    const WorkItem& item = batch->items[n];
    Status* status = &batch->statuses[n];
    for (int i = 0; i < item.outputs.size() && status->ok(); ++i) {
      Note(cudaMemcpyAsync(item.outputs[i].data, batch->places[n].outputs[i],
                           static_cast<size_t>(item.outputs[i].bytes), cudaMemcpyDeviceToHost,
                           stream_),
           "copy out", status);
    }
  }
}

int64_t CudaLane::Elapsed(Mark from, Mark to) const {
  float milliseconds = 0;
  if (cudaEventElapsedTime(&milliseconds, events_[from], events_[to]) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
}

void CudaLane::Finish(Batch* batch, cudaError_t error) {
  BatchOutcome outcome;
  outcome.statuses = std::move(batch->statuses);
  outcome.device_lost = poller_.device_lost();
  if (error == cudaSuccess) {
    outcome.copy_in_ns = Elapsed(kBegin, kCopiedIn);
    outcome.kernel_ns = Elapsed(kCopiedIn, kComputed);
    outcome.copy_out_ns = Elapsed(kComputed, kCopiedOut);
  } else {
    // The event could not be recorded, yet what was enqueued still uses the caller's memory.
    if (!outcome.device_lost) (void)cudaStreamSynchronize(stream_);
    for (Status& status : outcome.statuses) {
      if (status.ok()) status = Internal(ErrorText(error, "a batch on " + device_.name));
    }
  }
  Done done = std::move(batch->done);
  {
    std::lock_guard lock(mutex_);
    busy_ = false;
    idle_.notify_all();  // under the lock: the lane may be gone right after
  }
  done(std::move(outcome));
}

}  // namespace attend::cuda

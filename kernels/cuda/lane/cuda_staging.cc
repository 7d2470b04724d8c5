// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/lane/cuda_staging.h"

#include <cstdint>
#include <string>
#include <utility>

#include "kernels/cuda/lane/batch_layout.h"
#include "kernels/cuda/lane/engine_copy.h"
#include "kernels/cuda/runtime/cuda_event.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/device_scope.h"
#include "kernels/cuda/runtime/event_pool.h"

namespace attend::cuda {

class StagingStream::CudaStaging final : public Staging {
 public:
  CudaStaging(StagingStream& stream, CompletionPoller& poller, const HostSpan& host,
              std::shared_ptr<void> owner)
      : stream_(stream), poller_(poller), host_(host), owner_(std::move(owner)) {}
  ~CudaStaging() override;

  Status Open();
  Status Copy(int64_t offset, int64_t bytes) override;
  Status Finish() override;
  char* data() const override { return memory_ + residue(); }
  const DeviceEvent* after() const override { return event_.get(); }

 private:
  // The pool's memory is aligned to kLayoutAlignment; the host's may not be.
  int64_t residue() const {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(host_.data) %
                                static_cast<uintptr_t>(kLayoutAlignment));
  }
  Status Note(cudaError_t error, const char* what);

  StagingStream& stream_;
  CompletionPoller& poller_;
  const HostSpan host_;
  std::shared_ptr<void> owner_;
  std::shared_ptr<CudaEvent> event_;
  char* memory_ = nullptr;
  bool recorded_ = false;  // the event is recorded after the last copy
};

Status StagingStream::CudaStaging::Note(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  (void)cudaGetLastError();
  if (IsSticky(error)) poller_.ReportLoss(error);
  return ToStatus(error, std::string(what) + " on " + stream_.device_.name);
}

Status StagingStream::CudaStaging::Open() {
  const DeviceScope scope(stream_.device_.index);
  ATTEND_RETURN_IF_ERROR(Note(scope.error(), "staging"));
  ATTEND_RETURN_IF_ERROR(Note(stream_.events_.Take(&event_), "making an event"));
  void* memory = nullptr;
  ATTEND_RETURN_IF_ERROR(
      Note(stream_.pool_.Allocate(host_.bytes + residue(), stream_.stream_, &memory),
           "allocating memory for an upload"));
  memory_ = static_cast<char*>(memory);
  return Status();
}

Status StagingStream::CudaStaging::Copy(int64_t offset, int64_t bytes) {
  const DeviceScope scope(stream_.device_.index);
  ATTEND_RETURN_IF_ERROR(Note(scope.error(), "staging"));
  BoxCopy copy;
  copy.to = data() + offset;
  copy.from = static_cast<const char*>(host_.data) + offset;
  copy.width = bytes;
  return Note(EnqueueCopy(copy, cudaMemcpyHostToDevice, stream_.stream_), "copying an upload");
}

Status StagingStream::CudaStaging::Finish() {
  const DeviceScope scope(stream_.device_.index);
  ATTEND_RETURN_IF_ERROR(Note(scope.error(), "staging"));
  const cudaError_t error = cudaEventRecord(event_->get(), stream_.stream_);
  recorded_ = error == cudaSuccess;
  return Note(error, "recording the end of an upload");
}

StagingStream::CudaStaging::~CudaStaging() {
  if (event_ == nullptr) return;
  const DeviceScope scope(stream_.device_.index);
  if (memory_ == nullptr) {  // nothing was recorded
    stream_.events_.Give(std::move(event_));
    return;
  }
  cudaError_t error = scope.error();
  if (error == cudaSuccess && !recorded_) {
    error = cudaEventRecord(event_->get(), stream_.stream_);
  }
  // The free is ordered after the copies on the stream; all other readers have completed.
  stream_.pool_.Free(memory_, stream_.stream_);
  const bool reached = error == cudaSuccess && cudaEventQuery(event_->get()) == cudaSuccess;
  (void)cudaGetLastError();
  if (reached) {
    stream_.events_.Give(std::move(event_));
    return;
  }
  const cudaEvent_t last = event_->get();
  poller_.Add(last, error,
              [&poller = poller_, &stream = stream_, event = std::move(event_),
               owner = std::move(owner_)](cudaError_t outcome) mutable {
                if (outcome == cudaSuccess) {
                  stream.events_.Give(std::move(event));
                } else if (!poller.device_lost()) {
                  // Copies may still be running, and no event marks their end.
                  (void)cudaStreamSynchronize(stream.stream_);
                }
                owner.reset();
              });
}

StagingStream::~StagingStream() {
  if (stream_ == nullptr) return;
  const DeviceScope scope(device_.index);
  events_.Clear();  // all events are back: the poller is already destroyed
  (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

Status StagingStream::Open() {
  const std::string where = "making a stream for uploads on " + device_.name;
  const DeviceScope scope(device_.index);
  ATTEND_RETURN_IF_ERROR(ToStatus(scope.error(), where));
  int least = 0, greatest = 0;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), where));
  return ToStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, least), where);
}

Result<std::unique_ptr<Staging>> StagingStream::Make(const HostSpan& host,
                                                     std::shared_ptr<void> owner,
                                                     CompletionPoller& poller) {
  auto staging = std::make_unique<CudaStaging>(*this, poller, host, std::move(owner));
  ATTEND_RETURN_IF_ERROR(staging->Open());
  return std::unique_ptr<Staging>(std::move(staging));
}

}  // namespace attend::cuda

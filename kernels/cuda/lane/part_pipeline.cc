// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/lane/part_pipeline.h"

#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

void Destroy(cudaEvent_t event) {
  if (event != nullptr) (void)cudaEventDestroy(event);
}

cudaError_t MakeOrderingEvent(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
}

}  // namespace

Status PartPipeline::Open(const std::string& where) {
  int least = 0, greatest = 0;
  ATTEND_RETURN_IF_ERROR(ToStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest), where));
  for (int stage = 0; stage < kStages; ++stage) {
    ATTEND_RETURN_IF_ERROR(ToStatus(
        cudaStreamCreateWithPriority(&streams_[stage], cudaStreamNonBlocking, least), where));
    ATTEND_RETURN_IF_ERROR(ToStatus(MakeOrderingEvent(&joined_[stage]), where));
    for (Marks& marks : marks_) {
      ATTEND_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&marks.begin[stage]), where));
      ATTEND_RETURN_IF_ERROR(ToStatus(cudaEventCreate(&marks.end[stage]), where));
    }
  }
  return ToStatus(MakeOrderingEvent(&cleared_), where);
}

PartPipeline::~PartPipeline() {
  Destroy(cleared_);
  for (int stage = 0; stage < kStages; ++stage) {
    Destroy(joined_[stage]);
    for (const Marks& marks : marks_) {
      Destroy(marks.begin[stage]);
      Destroy(marks.end[stage]);
    }
    if (streams_[stage] != nullptr) (void)cudaStreamDestroy(streams_[stage]);
  }
}

cudaError_t PartPipeline::WaitFor(cudaEvent_t event) {
  cudaError_t first = cudaSuccess;
  for (cudaStream_t stream : streams_) {
    const cudaError_t error = cudaStreamWaitEvent(stream, event);
    if (first == cudaSuccess) first = error;
  }
  return first;
}

cudaError_t PartPipeline::Join(cudaStream_t stream) {
  cudaError_t first = cudaSuccess;
  for (int stage = 0; stage < kStages; ++stage) {
    cudaError_t error = cudaEventRecord(joined_[stage], streams_[stage]);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, joined_[stage]);
    if (first == cudaSuccess) first = error;
  }
  return first;
}

void PartPipeline::Synchronize() {
  for (cudaStream_t stream : streams_) (void)cudaStreamSynchronize(stream);
}

}  // namespace attend::cuda

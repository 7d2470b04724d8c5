// SPDX-License-Identifier: Apache-2.0
//
// A call computed in this process by libattend_kernels.so. For a GPU its tensors begin and end in
// host memory, as a client's do: they are copied to the device and back.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/call/attention_call.h"
#include "kernels/c/attend_c.h"

namespace attend::client {

// "cpu", "cuda:1", or "auto": the first GPU, else the CPU. Returns ATTEND_CPU or CUDA's ordinal.
// INVALID_ARGUMENT: other words. FAILED_PRECONDITION: no such GPU.
Result<int32_t> ParseDevice(const std::string& name);

class LocalCall {
 public:
  using NowNs = std::function<int64_t()>;

  // `call`'s tensors must outlive this. UNIMPLEMENTED: gradients, sessions, or no kernel of the
  // device can compute it. RESOURCE_EXHAUSTED: not enough device memory.
  static Result<std::unique_ptr<LocalCall>> Make(int32_t device, const AttentionCall& call);
  ~LocalCall();

  // Computes the call once. Returns copy_in, kernel, copy_out and total times.
  Result<PhaseTimings> Run(const NowNs& now);
  // O, LSE and the kernel's name from the last Run.
  const AttentionResult& result() const { return result_; }

 private:
  // Host memory that a run reads or writes, and its device copy.
  struct Mirror {
    void* device;
    const void* host;
    int64_t bytes;
  };

  LocalCall(int32_t device, AttentionCall call) : device_(device), call_(std::move(call)) {}
  Status Prepare();
  // Makes `*pointer` point to the device copy; no effect on the CPU.
  template <class T>
  Status MirrorIn(T** pointer, int64_t bytes);
  Status MirrorAll();
  Status Copy(const std::vector<Mirror>& mirrors, int32_t kind);

  const int32_t device_;
  const AttentionCall call_;  // with its tree written out
  AttentionResult result_;
  attend_params params_ = {};
  std::vector<Mirror> inputs_, outputs_;
  std::vector<void*> memory_;  // on the device
};

}  // namespace attend::client

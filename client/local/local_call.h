// SPDX-License-Identifier: Apache-2.0
//
// A call that is computed in this process, by libattend_kernels.so. On a GPU its tensors begin and
// end in host memory, as a client's do: they are copied to the device and back.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/call/attention_call.h"
#include "kernels/c/attend_c.h"

namespace attend::client {

// "cpu", "cuda:1", or "auto": the first GPU, or the CPU where there is none. INVALID_ARGUMENT for
// other words, FAILED_PRECONDITION for a GPU that is not there. ATTEND_CPU or CUDA's ordinal.
Result<int32_t> ParseDevice(const std::string& name);

class LocalCall {
 public:
  using NowNs = std::function<int64_t()>;

  // `call` must outlive it. UNIMPLEMENTED for gradients, sessions and what no kernel of the device
  // computes; RESOURCE_EXHAUSTED if the device has not enough memory.
  static Result<std::unique_ptr<LocalCall>> Make(int32_t device, const AttentionCall& call);
  ~LocalCall();

  // Computes it once and says how long that took: copy_in, kernel, copy_out and total.
  Result<PhaseTimings> Run(const NowNs& now);
  // What the last Run computed: O, LSE and the kernel's name.
  const AttentionResult& result() const { return result_; }

 private:
  // Host memory that a run reads or writes, and its copy on the device.
  struct Mirror {
    void* device;
    const void* host;
    int64_t bytes;
  };

  LocalCall(int32_t device, const AttentionCall& call) : device_(device), call_(call) {}
  Status Prepare();
  void Describe(const Attention& attention);
  // Makes `*pointer` refer to the device's copy; nothing on the CPU.
  template <class T>
  Status MirrorIn(T** pointer, int64_t bytes);
  Status MirrorAll();
  Status Copy(const std::vector<Mirror>& mirrors, int32_t kind);

  const int32_t device_;
  const AttentionCall& call_;
  AttentionResult result_;
  attend_params params_ = {};
  std::vector<Mirror> inputs_, outputs_;
  std::vector<void*> memory_;  // on the device
};

}  // namespace attend::client

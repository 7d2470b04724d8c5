// SPDX-License-Identifier: Apache-2.0
//
// The operations of a kind of device (the CPU, or CUDA) that the C ABI is built on. Stateless; any
// thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/util/status.h"

namespace attend::c {

// One attention on the device, with its kernel and the index of a compiled variant (-1: the best).
struct Item {
  KernelId kernel = KernelId::kCpuReference;
  Attention attention;
  int config = -1;
};

// The backward pass of one attention.
struct BackwardItem {
  Item forward;
  Gradients gradients;
};

// `index` is the C ABI's device number: CUDA's ordinal, or ATTEND_CPU. Streams are CUDA's, and must
// be null on the CPU.
class Device {
 public:
  virtual ~Device() = default;

  virtual Result<DeviceInfo> Info(int32_t index) const = 0;
  virtual MemoryTraits Traits(const Attention& attention) const = 0;
  virtual MemoryTraits Traits(const BackwardItem& item) const = 0;
  // Static, NUL-terminated strings; at least one.
  virtual std::vector<std::string_view> Variants(KernelId kernel, const Problem& problem) const = 0;

  virtual Result<int64_t> WorkspaceBytes(std::span<const Item> items) const = 0;
  // `workspace` is aligned and large enough.
  virtual Status Run(int32_t index, std::span<const Item> items, void* workspace,
                     int64_t workspace_bytes, void* stream) const = 0;
  virtual Result<int64_t> WorkspaceBytes(const BackwardItem& item) const = 0;
  virtual Status Run(int32_t index, const BackwardItem& item, void* workspace,
                     int64_t workspace_bytes, void* stream) const = 0;

  // Arguments are validated: no null, no 0 bytes.
  virtual Result<void*> Malloc(int32_t index, int64_t bytes) const = 0;
  virtual Status Free(int32_t index, void* data) const = 0;
  virtual Status Memcpy(int32_t index, void* to, const void* from, int64_t bytes, int32_t kind,
                        void* stream) const = 0;
  virtual Status Memset(int32_t index, void* data, int32_t value, int64_t bytes,
                        void* stream) const = 0;
  virtual Status Synchronize(int32_t index, void* stream) const = 0;
};

const Device& CpuDevice();
// Refuses every call in a build without CUDA.
const Device& CudaDevice();

// Number of GPUs; `why`, which must not be null, explains 0.
Result<int32_t> CudaDevices(std::string* why);

// INVALID_ARGUMENT: neither ATTEND_CPU nor a valid ordinal.
Result<const Device*> DeviceOf(int32_t index);

// Name of the only variant of a kernel without variants.
inline constexpr std::string_view kOnlyVariant = "the_only_one";

// Prefixes an error with the index of the params it belongs to, if there are several.
Status At(size_t index, size_t count, const Status& status);

}  // namespace attend::c

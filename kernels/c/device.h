// SPDX-License-Identifier: Apache-2.0
//
// What the C ABI needs of a kind of device, the CPU or CUDA's. Keeps no state; any thread.

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

// One attention on the device, the kernel to compute it, and which of its compiled variants; -1 is
// the best.
struct Item {
  KernelId kernel = KernelId::kCpuReference;
  Attention attention;
  int config = -1;
};

// The backward pass of one.
struct BackwardItem {
  Item forward;
  Gradients gradients;
};

// `index` is a device's number in the C ABI: CUDA's ordinal, or ATTEND_CPU. Streams are CUDA's, and
// must be null on the CPU.
class Device {
 public:
  virtual ~Device() = default;

  virtual Result<DeviceInfo> Info(int32_t index) const = 0;
  virtual MemoryTraits Traits(const Attention& attention) const = 0;
  virtual MemoryTraits Traits(const BackwardItem& item) const = 0;
  // Static strings, terminated; one at least.
  virtual std::vector<std::string_view> Variants(KernelId kernel, const Problem& problem) const = 0;

  virtual Result<int64_t> WorkspaceBytes(std::span<const Item> items) const = 0;
  // `workspace` is aligned, and large enough.
  virtual Status Run(int32_t index, std::span<const Item> items, void* workspace,
                     int64_t workspace_bytes, void* stream) const = 0;
  virtual Result<int64_t> WorkspaceBytes(const BackwardItem& item) const = 0;
  virtual Status Run(int32_t index, const BackwardItem& item, void* workspace,
                     int64_t workspace_bytes, void* stream) const = 0;

  // Arguments are checked: no null, nothing of 0 bytes.
  virtual Result<void*> Malloc(int32_t index, int64_t bytes) const = 0;
  virtual Status Free(int32_t index, void* data) const = 0;
  virtual Status Memcpy(int32_t index, void* to, const void* from, int64_t bytes, int32_t kind,
                        void* stream) const = 0;
  virtual Status Memset(int32_t index, void* data, int32_t value, int64_t bytes,
                        void* stream) const = 0;
  virtual Status Synchronize(int32_t index, void* stream) const = 0;
};

const Device& CpuDevice();
// In a build without CUDA, one that refuses.
const Device& CudaDevice();

// How many GPUs there are; `why`, which is not null, says why there are none.
Result<int32_t> CudaDevices(std::string* why);

// INVALID_ARGUMENT: neither ATTEND_CPU nor an ordinal.
Result<const Device*> DeviceOf(int32_t index);

// The name of the variant of a kernel that has no others.
inline constexpr std::string_view kOnlyVariant = "the_only_one";

// Puts which of several params a fault belongs to before it.
Status At(size_t index, size_t count, const Status& status);

}  // namespace attend::c

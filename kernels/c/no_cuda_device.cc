// SPDX-License-Identifier: Apache-2.0
//
// The GPU device of a build without CUDA: every call fails with the reason.

#include "kernels/c/device.h"

namespace attend::c {
namespace {

constexpr char kWhy[] = "this build has no CUDA kernels";

Status Refusal(int32_t index) {
  return Unimplemented("device cuda:" + std::to_string(index) + ": " + kWhy);
}

// Callers ask for Info first, which fails, so no kernel is ever selected.
class NoCuda : public Device {
 public:
  Result<DeviceInfo> Info(int32_t index) const override { return Refusal(index); }
  MemoryTraits Traits(const Attention&) const override { return {}; }
  MemoryTraits Traits(const BackwardItem&) const override { return {}; }
  std::vector<std::string_view> Variants(KernelId, const Problem&) const override {
    return {kOnlyVariant};
  }
  Result<int64_t> WorkspaceBytes(std::span<const Item>) const override {
    return Unimplemented(kWhy);
  }
  Result<int64_t> WorkspaceBytes(const BackwardItem&) const override { return Unimplemented(kWhy); }
  Status Run(int32_t index, std::span<const Item>, void*, int64_t, void*) const override {
    return Refusal(index);
  }
  Status Run(int32_t index, const BackwardItem&, void*, int64_t, void*) const override {
    return Refusal(index);
  }
  Result<void*> Malloc(int32_t index, int64_t) const override { return Refusal(index); }
  Status Free(int32_t index, void*) const override { return Refusal(index); }
  Status Memcpy(int32_t index, void*, const void*, int64_t, int32_t, void*) const override {
    return Refusal(index);
  }
  Status Memset(int32_t index, void*, int32_t, int64_t, void*) const override {
    return Refusal(index);
  }
  Status Synchronize(int32_t index, void*) const override { return Refusal(index); }
};

}  // namespace

const Device& CudaDevice() {
  static const NoCuda device;
  return device;
}

Result<int32_t> CudaDevices(std::string* why) {
  *why = kWhy;
  return 0;
}

}  // namespace attend::c

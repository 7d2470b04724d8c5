// SPDX-License-Identifier: Apache-2.0
//
// The CPU as a device of the C ABI: host memory, no streams, synchronous.

#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/c/device.h"
#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_gradients.h"
#include "kernels/cpu/guarded.h"
#include "kernels/cpu/parallel_reference.h"
#include "kernels/cpu/tile_unit.h"
#include "kernels/reference/reference_gradients.h"

namespace attend::c {
namespace {

constexpr size_t kAlignment = 256;

std::string Text(int64_t value) { return std::to_string(value); }

Status CheckStream(const void* stream) {
  if (stream == nullptr) return Status();
  return InvalidArgument("stream is not NULL, but the CPU has none");
}

Status CheckConfig(const Item& item) {
  if (item.config == -1 || item.config == 0) return Status();
  return InvalidArgument("config is " + Text(item.config) + ", must be -1 or in [0, 1) for " +
                         std::string(KernelName(item.kernel)));
}

Status CheckLengths(const char* name, const int64_t* lengths, int64_t count, int64_t bound) {
  for (int64_t n = 0; lengths != nullptr && n < count; ++n) {
    if (lengths[n] >= 0 && lengths[n] <= bound) continue;
    return InvalidArgument(std::string(name) + "[" + Text(n) + "] is " + Text(lengths[n]) +
                           ", must be in [0, " + Text(bound) + "]");
  }
  return Status();
}

// Offsets start at 0, never fall, and no sequence exceeds `longest`.
Status CheckOffsets(const char* name, const int64_t* offsets, int64_t count, int64_t total,
                    int64_t longest) {
  if (offsets[0] != 0) {
    return InvalidArgument(std::string(name) + "[0] is " + Text(offsets[0]) + ", must be 0");
  }
  for (int64_t n = 1; n <= count; ++n) {
    const int64_t before = offsets[n - 1];
    const int64_t most = longest < total - before ? before + longest : total;
    if (offsets[n] >= before && offsets[n] <= most) continue;
    return InvalidArgument(std::string(name) + "[" + Text(n) + "] is " + Text(offsets[n]) +
                           ", must be in [" + Text(before) + ", " + Text(most) + "]");
  }
  return Status();
}

// On the host, lengths and offsets can be validated before they are used.
Status CheckHost(const Item& item) {
  const Attention& a = item.attention;
  const Problem& p = a.problem;
  ATTEND_RETURN_IF_ERROR(CheckConfig(item));
  if (p.packed) {
    ATTEND_RETURN_IF_ERROR(CheckOffsets("q_offsets", a.q_offsets, p.batch, p.total_q, p.len_q));
    return CheckOffsets("kv_offsets", a.kv_offsets, p.batch, p.total_k, p.len_k);
  }
  ATTEND_RETURN_IF_ERROR(CheckLengths("q_lengths", a.q_lengths, p.batch, p.len_q));
  return CheckLengths("kv_lengths", a.kv_lengths, p.batch, p.len_k);
}

// All items of cpu_flash and cpu_flash_amx run as one batch, so that small attentions share the
// threads.
Status Compute(std::span<const Item> items) {
  std::vector<const Attention*> flash;
  size_t amx_from = 0;
  for (const KernelId kernel : {KernelId::kCpuFlash, KernelId::kCpuFlashAmx}) {
    amx_from = flash.size();
    for (const Item& item : items) {
      if (item.kernel == kernel) flash.push_back(&item.attention);
    }
  }
  ATTEND_RETURN_IF_ERROR(Guarded([&] { CpuFlash(flash, {}, amx_from); }));
  for (const Item& item : items) {
    if (item.kernel != KernelId::kCpuReference) continue;
    ATTEND_RETURN_IF_ERROR(Guarded([&] { ParallelReference(item.attention); }));
  }
  return Status();
}

class Cpu : public Device {
 public:
  Result<DeviceInfo> Info(int32_t) const override {
    DeviceInfo info;
    info.kind = DeviceKind::kCpu;
    info.name = "cpu";
    info.not_amx = cpu_flash::WhyNoAmx();
    return info;
  }

  MemoryTraits Traits(const Attention&) const override { return {}; }
  MemoryTraits Traits(const BackwardItem&) const override { return {}; }

  std::vector<std::string_view> Variants(KernelId, const Problem&) const override {
    return {kOnlyVariant};
  }

  Result<int64_t> WorkspaceBytes(std::span<const Item>) const override { return int64_t{0}; }
  Result<int64_t> WorkspaceBytes(const BackwardItem&) const override { return int64_t{0}; }

  Status Run(int32_t, std::span<const Item> items, void*, int64_t, void* stream) const override {
    ATTEND_RETURN_IF_ERROR(CheckStream(stream));
    for (size_t n = 0; n < items.size(); ++n) {
      ATTEND_RETURN_IF_ERROR(At(n, items.size(), CheckHost(items[n])));
    }
    return Compute(items);
  }

  Status Run(int32_t, const BackwardItem& item, void*, int64_t, void* stream) const override {
    ATTEND_RETURN_IF_ERROR(CheckStream(stream));
    ATTEND_RETURN_IF_ERROR(CheckHost(item.forward));
    const Attention& a = item.forward.attention;
    return Guarded([&] {
      if (item.forward.kernel == KernelId::kCpuReference) {
        CpuReferenceGradients(a, item.gradients);
      } else if (item.forward.kernel == KernelId::kCpuFlashAmx) {
        CpuFlashAmxGradients(a, item.gradients);
      } else {
        CpuFlashGradients(a, item.gradients);
      }
    });
  }

  Result<void*> Malloc(int32_t, int64_t bytes) const override {
    const size_t whole = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    void* const data = std::aligned_alloc(kAlignment, whole);
    if (data == nullptr) return ResourceExhausted("allocating " + Text(bytes) + " bytes on cpu");
    return data;
  }
  Status Free(int32_t, void* data) const override {
    std::free(data);
    return Status();
  }
  Status Memcpy(int32_t, void* to, const void* from, int64_t bytes, int32_t,
                void* stream) const override {
    ATTEND_RETURN_IF_ERROR(CheckStream(stream));
    std::memmove(to, from, static_cast<size_t>(bytes));
    return Status();
  }
  Status Memset(int32_t, void* data, int32_t value, int64_t bytes, void* stream) const override {
    ATTEND_RETURN_IF_ERROR(CheckStream(stream));
    std::memset(data, value, static_cast<size_t>(bytes));
    return Status();
  }
  Status Synchronize(int32_t, void* stream) const override { return CheckStream(stream); }
};

}  // namespace

const Device& CpuDevice() {
  static const Cpu device;
  return device;
}

}  // namespace attend::c

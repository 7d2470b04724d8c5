// SPDX-License-Identifier: Apache-2.0
//
// The only place that decides which kernel runs. Pure: values in, values out. Validation,
// dispatch, metrics labels, server info and tests all ask here, so "can it" and "what runs"
// cannot disagree.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/problem.h"
#include "kernels/status.h"

namespace attend {

enum class DeviceKind : int32_t { kCpu = 0, kCuda = 1 };

struct DeviceInfo {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;                    // CUDA ordinal; 0 for the CPU
  std::string name;                 // "cpu", "cuda:0": stable, used as a metrics label
  std::string description;          // "NVIDIA H200", "Intel Xeon ..., AVX3, 16 threads"
  int compute_capability = 0;       // 90 = 9.0; 0 for the CPU
  int units = 0;                    // multiprocessors or hardware threads
  int64_t memory_bytes = 0;         // total
  int64_t workspace_bytes_max = 0;  // the most that one launch may use beside its tensors
};

enum class KernelId : int32_t { kCpuReference = 0, kCpuFlash, kCudaNaive, kCudaFlashFp32 };
inline constexpr int kKernelCount = 4;

// What a kernel is, for people: GetServerInfo, --help, READMEs.
struct KernelInfo {
  KernelId id;
  std::string_view name;  // "cpu_flash"
  DeviceKind device;
  std::string_view summary;  // one sentence
};

// All kernels, in ladder order.
std::span<const KernelInfo> Kernels();
std::string_view KernelName(KernelId id);

struct Selection {
  KernelId kernel = KernelId::kCpuReference;
  std::string_view why;         // static storage; one clause
  int64_t workspace_bytes = 0;  // device memory beside the tensors
};

// `forced` is a kernel's name, or empty (or "auto") for the best one. `problem` has passed Check.
// INVALID_ARGUMENT: no such kernel. UNIMPLEMENTED: this device cannot, with the reason.
Result<Selection> Select(const Problem& problem, const DeviceInfo& device,
                         std::string_view forced = {});

}  // namespace attend

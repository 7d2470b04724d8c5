// SPDX-License-Identifier: Apache-2.0
//
// The only place that decides which kernel runs. Pure. Validation, dispatch, metrics labels, server
// info and tests all call it, so that "can it run" and "what runs" cannot disagree.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/contract/memory_traits.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

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
  int64_t workspace_bytes_max = 0;  // upper bound of one launch's workspace
  std::string uuid;                 // a GPU's 16 bytes as CUDA reports them; empty: none
  // Why the CPU has no tile unit for cpu_flash_amx; empty: it has one. Static storage.
  std::string_view not_amx = "cpu_flash_amx needs a CPU with AMX";
};

enum class KernelId : int32_t {
  kCpuReference = 0,
  kCpuFlash,
  kCpuFlashAmx,
  kCudaNaive,
  kCudaFlashFp32,
  kCudaFlashSm80,
  kCudaFlashSm90,
  kCudaDecodeSm80,
  kCudaDecodeSm90,
};
inline constexpr int kKernelCount = 9;

// Description of a kernel for people: GetServerInfo, READMEs.
struct KernelInfo {
  KernelId id;
  std::string_view name;  // "cpu_flash"
  DeviceKind device;
  std::string_view summary;  // one sentence
};

// All kernels, in ladder order.
std::span<const KernelInfo> Kernels();
std::string_view KernelName(KernelId id);

// Whether a kernel rounds the weights of 16-bit problems to their dtype, as matrix units require;
// its error bound is then wider. By name: true if the name is unknown.
bool RoundsWeights(KernelId id);
bool RoundsWeights(std::string_view name);

// Whether a kernel reads Q, K and V in 16-byte pieces, and so may need aligned copies.
bool ReadsAligned(KernelId id);

// The part of a problem that keeps a faster kernel of the same device away, or costs a copy first.
// Precision that was asked for (float32 inputs) is none.
enum class Fallback : int32_t {
  kNone = 0,
  kBias,
  kPages,
  kAlibi,
  kDropout,
  kFloat32Output,
  kScale,
  kSoftcap,
  kHeadDim,
  kAlignment,
  kAlignedCopy,  // the fast kernel runs, on copies of Q, K and V
};
// As a metric's label has them: "bias".
inline constexpr std::array<std::string_view, 11> kFallbackNames = {
    "none",  "bias",    "pages",    "alibi",     "dropout",     "float32_output",
    "scale", "softcap", "head_dim", "alignment", "aligned_copy"};

struct Selection {
  KernelId kernel = KernelId::kCpuReference;
  std::string_view why;         // static storage; one clause
  int64_t workspace_bytes = 0;  // device memory besides the tensors
  Fallback fallback = Fallback::kNone;
};

// Workspace of cuda_naive: all scores in fp32. INVALID_ARGUMENT on overflow.
Result<int64_t> NaiveWorkspaceBytes(const Problem& problem);

// `forced` is a kernel's name, or empty (or "auto") for the best one. `problem` has passed Check.
// INVALID_ARGUMENT: unknown kernel. UNIMPLEMENTED: this device cannot run it, with the reason.
Result<Selection> Select(const Problem& problem, const DeviceInfo& device, std::string_view forced,
                         const MemoryTraits& memory);
Result<Selection> Select(const Problem& problem, const DeviceInfo& device,
                         std::string_view forced = {});  // with ContiguousTraits

// Select for the backward pass (gradients.h), of a problem that has passed its Check. A kernel's
// backward pass goes by the forward kernel's name.
Result<Selection> SelectBackward(const Problem& problem, const DeviceInfo& device,
                                 std::string_view forced, const MemoryTraits& memory);
Result<Selection> SelectBackward(const Problem& problem, const DeviceInfo& device,
                                 std::string_view forced = {});  // with ContiguousTraits

}  // namespace attend

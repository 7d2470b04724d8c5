// SPDX-License-Identifier: Apache-2.0
//
// Items that are alike (Likeness) are laid out one after another in the workspace and share
// launches, as many at a time as fit. Each group runs: prepare (clear), row terms, measured rows,
// sink gradients, the gradient kernels, then repairs of non-finite elements on CUDA cores. Optional
// steps read flags that earlier kernels have set and return at once if there is nothing to do, so
// that the host never waits.

#include "kernels/cuda/backward/backward.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/contract/gradient_terms.h"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

constexpr int kHopper = 90;
constexpr int kAmpere = 8;           // major compute capability
constexpr int64_t kFewestRows = 16;  // per tile, lower bound over all kernels here
constexpr int64_t kTogetherBytes = int64_t{256} << 20;

// Which class of cuda_flash_sm80's kernels the problem needs.
enum class Sm80Class { kPlain, kGeneral, kDropout };
Sm80Class ClassOf(const Problem& p) {
  if (p.dropout > 0) return Sm80Class::kDropout;
  return HasScoreTerms(p) ? Sm80Class::kGeneral : Sm80Class::kPlain;
}

// Unit of LSE: kernels with score terms subtract LSE from the score before multiplying by log2(e).
float LseUnit(KernelId kernel, const Problem& p) {
  const bool late = kernel == KernelId::kCudaFlashSm90 ||
                    (kernel == KernelId::kCudaFlashSm80 && ClassOf(p) == Sm80Class::kPlain);
  return late ? kLog2E : 1.0f;
}

// The kernel for all gradients does not pay if only some are wanted.
bool TakesTurns(const BackwardItem& item) {
  const Gradients& g = item.gradients;
  return item.kernel == KernelId::kCudaFlashSm90 && item.room_for_turns && g.d_q.data != nullptr &&
         (g.d_k.data != nullptr || g.d_v.data != nullptr) && TakesTurns(item.attention.problem);
}

// Items can share launches if these agree.
auto Likeness(const BackwardItem& item) {
  const Problem& p = item.attention.problem;
  const Gradients& g = item.gradients;
  return std::tuple(item.kernel, TakesTurns(item), item.block_bytes_max, p.dtype, p.dim, p.dim_v,
                    HasScoreTerms(p), p.dropout > 0, g.d_q.data != nullptr, g.d_k.data != nullptr,
                    g.d_v.data != nullptr, g.d_bias.data != nullptr, g.d_sinks != nullptr);
}

// Upper bound of a block's loop. Items with the longest loops start first, so that none runs alone
// at the end; this affects no bits.
int64_t LongestWalk(const BackwardItem& item) {
  const Problem& p = item.attention.problem;
  return p.heads_kv == 0 ? 0 : std::max(p.group() * p.len_q, p.len_k);
}

int64_t Aligned(int64_t bytes) {
  return (bytes + kTurnAlignment - 1) / kTurnAlignment * kTurnAlignment;
}

// Bytes for one item, padded so that another's may follow.
Result<int64_t> WorkspaceBytes(const BackwardItem& item) {
  const Problem& p = item.attention.problem;
  const int64_t longest = std::max(p.len_q, p.len_k) / kFewestRows + 1;
  const Result<int64_t> tiles = CheckedProduct("tiles", p.batch, p.heads_q, longest);
  if (!tiles.ok()) return tiles;
  if (*tiles > kLaunchTilesMax) {
    return InvalidArgument("tiles of the backward pass are " + std::to_string(*tiles) +
                           ", must be at most " + std::to_string(kLaunchTilesMax));
  }
  const Result<int64_t> bytes = TakesTurns(item) ? TurnWorkspaceBytes(p) : GradientTermsBytes(p);
  if (!bytes.ok() || *bytes > INT64_MAX - kTurnAlignment) return bytes;
  return Aligned(*bytes);
}

// OK if the item's kernel can compute it on a GPU that supports the kernel.
Status CheckKernel(const BackwardItem& item) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "CUDA";
  device.compute_capability = kHopper;
  device.workspace_bytes_max = INT64_MAX;  // provided by the caller
  return SelectBackward(item.attention.problem, device, KernelName(item.kernel),
                        {.not_tma = WhyNotTma(item.attention, item.gradients)})
      .status();
}

// mma.sync computes dQ, dK and dV; dBias is always computed on CUDA cores.
cudaError_t LaunchBiasGradients(Passes passes, cudaStream_t stream) {
  if (passes.front().gradients.d_bias.data == nullptr) return cudaSuccess;
  std::vector<BackwardPass> only(passes.begin(), passes.end());
  for (BackwardPass& pass : only) {
    pass.gradients.d_q.data = pass.gradients.d_k.data = pass.gradients.d_v.data = nullptr;
    pass.gradients.d_sinks = nullptr;
    pass.doubt = nullptr;  // their delta is already measured
  }
  return LaunchFp32Gradients(only, stream);
}

// Recomputes the elements that the Tensor Core kernels left non-finite, from rows as measured on
// CUDA cores; only delta is kept.
cudaError_t LaunchRepairs(std::vector<BackwardPass> passes, cudaStream_t stream) {
  for (BackwardPass& pass : passes) {
    pass.lse_unit = 1.0f;
    pass.doubt = nullptr;
  }
  return LaunchFp32Repairs(passes, stream);
}

// Describes the item to the kernels, with its memory at `at` in the workspace; advances `at` past
// it.
BackwardPass LayOut(const BackwardItem& item, int block_bytes_max, char* workspace, int64_t* at) {
  const Problem& p = item.attention.problem;
  char* const base = workspace + *at;
  const int64_t terms = TermsOfHead(p) * p.heads_q + kTermSlack;
  static_assert(sizeof(PassFlags) <= kTermFlagBytes);
  BackwardPass pass;
  pass.attention = item.attention;
  pass.gradients = item.gradients;
  pass.lse_unit = LseUnit(item.kernel, p);
  pass.flags = reinterpret_cast<PassFlags*>(base);
  pass.lse = reinterpret_cast<float*>(base + kTermFlagBytes + RedoBytes(p));
  pass.less = pass.lse + terms;
  pass.shift = pass.less + terms;
  pass.doubt = pass.shift + terms;
  pass.block_bytes_max = item.block_bytes_max > 0 ? item.block_bytes_max : block_bytes_max;
  *at += Aligned(kTermFlagBytes + RedoBytes(p) + 4 * terms * static_cast<int64_t>(sizeof(float)) +
                 p.batch * p.heads_q * kHeadPartBytes);
  if (!TakesTurns(item)) return pass;
  const int64_t tiles = TurnTilesOfHead(p) * p.heads_q;
  pass.turns = reinterpret_cast<uint32_t*>(workspace + *at);
  *at += TurnCounterBytes(tiles);
  pass.sums = reinterpret_cast<float*>(workspace + *at);
  *at += tiles * kTurnTileBytes;
  return pass;
}

cudaError_t LaunchKernels(KernelId kernel, const std::vector<BackwardPass>& passes,
                          cudaStream_t stream) {
  cudaError_t error = LaunchPrepare(passes, stream);
  if (error == cudaSuccess) error = LaunchRowTerms(passes, stream);
  if (error != cudaSuccess) return error;
  if (kernel == KernelId::kCudaFlashFp32) return LaunchFp32Gradients(passes, stream);
  const Problem& p = passes.front().attention.problem;
  const bool by_wgmma = kernel == KernelId::kCudaFlashSm90 && !CapOf(p).on() && p.dropout == 0;
  error = by_wgmma ? LaunchSm90Measure(passes, stream) : LaunchSm80Measure(passes, stream);
  if (error == cudaSuccess) error = LaunchSinkGradients(passes, stream);
  if (error == cudaSuccess && kernel == KernelId::kCudaFlashSm90) {
    error = LaunchSm90Gradients(passes, stream);
  }
  if (error == cudaSuccess && kernel == KernelId::kCudaFlashSm80) {
    error = LaunchSm80Gradients(passes, stream);
    if (error == cudaSuccess) error = LaunchBiasGradients(passes, stream);
  }
  return error == cudaSuccess ? LaunchRepairs(passes, stream) : error;
}

cudaError_t LaunchSm80(Passes passes, Sm80Task task, cudaStream_t stream) {
  const Problem& p = passes.front().attention.problem;
  const bool f16 = p.dtype == DType::kFloat16;
  const auto launch = [&](auto of_f16, auto of_bf16) {
    return (f16 ? of_f16 : of_bf16)(passes, task, stream);
  };
  switch (ClassOf(p)) {
    case Sm80Class::kDropout:
      return launch(LaunchSm80DropoutF16, LaunchSm80DropoutBf16);
    case Sm80Class::kGeneral:
      return launch(LaunchSm80GeneralF16, LaunchSm80GeneralBf16);
    case Sm80Class::kPlain:
      break;
  }
  return launch(LaunchSm80PlainF16, LaunchSm80PlainBf16);
}

Status Failure(cudaError_t error, KernelId kernel) {
  (void)cudaGetLastError();
  return Internal(
      ErrorText(error, "launching the backward pass of " + std::string(KernelName(kernel))));
}

// Launches items that are alike, with room for all.
Status LaunchAlike(std::span<const BackwardItem* const> items, int block_bytes_max, char* workspace,
                   cudaStream_t stream) {
  std::vector<BackwardPass> passes;
  int64_t at = 0;
  for (const BackwardItem* item : items) {
    passes.push_back(LayOut(*item, block_bytes_max, workspace, &at));
  }
  const KernelId kernel = items.front()->kernel;
  const cudaError_t error = LaunchKernels(kernel, passes, stream);
  return error == cudaSuccess ? Status() : Failure(error, kernel);
}

}  // namespace

std::string_view WhyNotTma(const Attention& a, const Gradients& g) {
  Attention of_d_o = a;
  of_d_o.q = g.d_o;
  const std::string_view why_not = WhyNotTma(a);
  if (!why_not.empty() || WhyNotTma(of_d_o).empty()) return why_not;
  return "d_o does not begin, or has strides that are not, on 16-byte boundaries, as Hopper's copy "
         "engine needs";
}

Result<int64_t> BackwardWorkspaceBytes(std::span<const BackwardItem> items) {
  int64_t most = 0;
  int64_t together = 0;
  for (const BackwardItem& item : items) {
    const Result<int64_t> bytes = WorkspaceBytes(item);
    if (!bytes.ok()) return bytes;
    most = std::max(most, *bytes);
    together = std::min(together + std::min(*bytes, kTogetherBytes), kTogetherBytes);
  }
  return std::max(most, together);
}

Status LaunchBackward(std::span<const BackwardItem> items, void* workspace, int64_t workspace_bytes,
                      cudaStream_t stream) {
  std::vector<int64_t> bytes;
  for (const BackwardItem& item : items) {
    ATTEND_RETURN_IF_ERROR(CheckKernel(item));
    const Result<int64_t> needed = WorkspaceBytes(item);
    if (!needed.ok()) return needed.status();
    if (workspace_bytes < *needed) {
      return InvalidArgument("workspace_bytes is " + std::to_string(workspace_bytes) +
                             ", must be at least " + std::to_string(*needed));
    }
    bytes.push_back(*needed);
  }
  if (items.empty()) return Status();
  int block_bytes_max = 0;
  const cudaError_t error = ReadBlockBytesMax(&block_bytes_max);
  if (error != cudaSuccess) return Failure(error, items.front().kernel);
  std::vector<bool> launched(items.size());
  for (size_t first = 0; first < items.size(); ++first) {
    if (launched[first]) continue;
    std::vector<const BackwardItem*> alike;
    int64_t left = workspace_bytes;
    for (size_t n = first; n < items.size(); ++n) {
      if (launched[n] || bytes[n] > left || Likeness(items[n]) != Likeness(items[first])) continue;
      launched[n] = true;
      left -= bytes[n];
      alike.push_back(&items[n]);
    }
    std::stable_sort(alike.begin(), alike.end(), [](const auto* x, const auto* y) {
      return LongestWalk(*x) > LongestWalk(*y);
    });
    ATTEND_RETURN_IF_ERROR(
        LaunchAlike(alike, block_bytes_max, static_cast<char*>(workspace), stream));
  }
  return Status();
}

cudaError_t LoadBackward(int compute_major) {
  if (compute_major > kHopper / 10) return cudaSuccess;
  constexpr std::pair<int64_t, int64_t> kDims[] = {
      {64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};
  float anything = 0.0f;
  BackwardPass pass;  // without rows or keys
  Gradients& g = pass.gradients;
  g.d_q.data = g.d_k.data = g.d_v.data = g.d_bias.data = g.d_sinks = &anything;
  Problem& p = pass.attention.problem;
  cudaError_t error = ReadBlockBytesMax(&pass.block_bytes_max);
  if (error != cudaSuccess) return error;
  for (const auto& [dim, dim_v] : kDims) {
    std::tie(p.dim, p.dim_v) = std::pair(dim, dim_v);
    error = LaunchKernels(KernelId::kCudaFlashFp32, {pass}, nullptr);
    // Its classes: without score terms (on Hopper also in turns), with them, and with dropout.
    for (int n = 0; n < 10 && error == cudaSuccess && compute_major >= kAmpere; ++n) {
      p.dtype = n % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
      p.softcap = n / 2 == 2 || n / 2 == 4 ? 1.0f : 0.0f;
      p.dropout = n / 2 >= 3 ? 1 : 0;
      pass.sums = n / 2 == 1 ? &anything : nullptr;
      error = LaunchKernels(KernelId::kCudaFlashSm80, {pass}, nullptr);
      if (error != cudaSuccess || compute_major < kHopper / 10) continue;
      error = LaunchKernels(KernelId::kCudaFlashSm90, {pass}, nullptr);
    }
    p = {};
    pass.sums = nullptr;
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSm80Measure(Passes passes, cudaStream_t stream) {
  return LaunchSm80(passes, Sm80Task::kMeasure, stream);
}
cudaError_t LaunchSm80Gradients(Passes passes, cudaStream_t stream) {
  return LaunchSm80(passes, Sm80Task::kGradients, stream);
}

cudaError_t LaunchSm90Measure(Passes passes, cudaStream_t stream) {
  return passes.front().attention.problem.dtype == DType::kFloat16
             ? LaunchSm90MeasureF16(passes, stream)
             : LaunchSm90MeasureBf16(passes, stream);
}
cudaError_t LaunchSm90Gradients(Passes passes, cudaStream_t stream) {
  return passes.front().attention.problem.dtype == DType::kFloat16
             ? LaunchSm90GradientsF16(passes, stream)
             : LaunchSm90GradientsBf16(passes, stream);
}

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/backward/backward.h"

#include <algorithm>
#include <string>

#include "kernels/contract/gradient_terms.h"
#include "kernels/cuda/backward/pass.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {
namespace {

constexpr int kHopper = 90;
constexpr int64_t kFewestRows = 32;  // of a tile of any kernel here

// Which of cuda_flash_sm80's kernels it takes.
enum class Sm80Class { kPlain, kGeneral, kDropout };
Sm80Class ClassOf(const Problem& p) {
  if (p.dropout > 0) return Sm80Class::kDropout;
  const bool terms = p.softcap > 0.0f || p.has_bias || p.has_alibi;
  return terms ? Sm80Class::kGeneral : Sm80Class::kPlain;
}

// Kernels with score terms take the difference of score and LSE before it is multiplied.
float LseUnit(KernelId kernel, const Problem& p) {
  const bool late = kernel != KernelId::kCudaFlashSm80 || ClassOf(p) == Sm80Class::kPlain;
  return late ? kLog2E : 1.0f;
}

// One kernel for all gradients is one too many where only some are wanted.
bool TakesTurns(const BackwardItem& item) {
  const Gradients& g = item.gradients;
  return item.kernel == KernelId::kCudaFlashSm90 && item.room_for_turns && g.d_q.data != nullptr &&
         (g.d_k.data != nullptr || g.d_v.data != nullptr) && TakesTurns(item.attention.problem);
}

// Items run one after another and share their workspace.
Result<int64_t> WorkspaceBytes(const BackwardItem& item) {
  const Problem& p = item.attention.problem;
  // Tiles of rows or keys of every head: a grid of each.
  const int64_t longest = std::max(p.len_q, p.len_k) / kFewestRows + 1;
  const Result<int64_t> tiles = CheckedProduct("tiles", p.batch, p.heads_q, longest);
  if (!tiles.ok()) return tiles;
  if (*tiles > kLaunchTilesMax) {
    return InvalidArgument("tiles of the backward pass are " + std::to_string(*tiles) +
                           ", must be at most " + std::to_string(kLaunchTilesMax));
  }
  return TakesTurns(item) ? TurnWorkspaceBytes(p) : GradientTermsBytes(p);
}

// OK if the item's kernel can compute it, on a GPU that has it.
Status CheckKernel(const BackwardItem& item) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.name = "CUDA";
  device.compute_capability = kHopper;
  device.workspace_bytes_max = INT64_MAX;  // the caller's
  return SelectBackward(item.attention.problem, device, KernelName(item.kernel),
                        {.not_tma = WhyNotTma(item.attention, item.gradients)})
      .status();
}

// mma.sync leaves dQ, dK and dV; dBias is CUDA cores' in any case.
cudaError_t LaunchBiasGradients(const BackwardPass& pass, cudaStream_t stream) {
  BackwardPass only = pass;
  only.gradients.d_q.data = only.gradients.d_k.data = only.gradients.d_v.data = nullptr;
  only.redo = nullptr;
  return LaunchFp32Gradients(only, stream);
}

// The item as the kernels see it, with its parts of the workspace; returns where those end that
// must be 0.
int64_t LayOut(const BackwardItem& item, void* workspace, BackwardPass* pass) {
  const Problem& p = item.attention.problem;
  char* const base = static_cast<char*>(workspace);
  const int64_t terms = TermsOfHead(p) * p.heads_q + kTermSlack;
  pass->attention = item.attention;
  pass->gradients = item.gradients;
  pass->lse_unit = LseUnit(item.kernel, p);
  pass->lse = reinterpret_cast<float*>(base + kTermFlagBytes);
  pass->less = pass->lse + terms;
  if (item.kernel != KernelId::kCudaFlashFp32) pass->redo = reinterpret_cast<int*>(base);
  const int64_t terms_end = kTermFlagBytes + 2 * terms * static_cast<int64_t>(sizeof(float));
  if (!TakesTurns(item)) return terms_end;
  const int64_t turns = (terms_end + kTurnAlignment - 1) / kTurnAlignment * kTurnAlignment;
  const int64_t turns_end = turns + TurnCounterBytes(TurnTilesOfHead(p) * p.heads_q);
  pass->begun = reinterpret_cast<uint32_t*>(base) + 1;
  pass->turns = reinterpret_cast<uint32_t*>(base + turns);
  pass->sums = reinterpret_cast<float*>(base + turns_end);
  return turns_end;
}

// What the Tensor Cores left is computed again where it is not finite.
cudaError_t Launch(KernelId kernel, BackwardPass pass, cudaStream_t stream) {
  cudaError_t error = LaunchRowTerms(pass, stream);
  if (error == cudaSuccess) error = LaunchSinkGradients(pass, stream);
  if (error == cudaSuccess && kernel == KernelId::kCudaFlashSm90) {
    error = LaunchSm90Gradients(pass, stream);
  }
  if (error == cudaSuccess && kernel == KernelId::kCudaFlashSm80) {
    error = LaunchSm80Gradients(pass, stream);
    if (error == cudaSuccess) error = LaunchBiasGradients(pass, stream);
    pass.gradients.d_bias.data = nullptr;
  }
  if (error == cudaSuccess) error = LaunchFp32Gradients(pass, stream);
  return error;
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
  for (const BackwardItem& item : items) {
    const Result<int64_t> bytes = WorkspaceBytes(item);
    if (!bytes.ok()) return bytes;
    most = std::max(most, *bytes);
  }
  return most;
}

Status LaunchBackward(std::span<const BackwardItem> items, void* workspace, int64_t workspace_bytes,
                      cudaStream_t stream) {
  for (const BackwardItem& item : items) {
    ATTEND_RETURN_IF_ERROR(CheckKernel(item));
  }
  const Result<int64_t> needed = BackwardWorkspaceBytes(items);
  if (!needed.ok()) return needed.status();
  if (workspace_bytes < *needed) {
    return InvalidArgument("workspace_bytes is " + std::to_string(workspace_bytes) +
                           ", must be at least " + std::to_string(*needed));
  }
  for (const BackwardItem& item : items) {
    BackwardPass pass;
    const int64_t zeros = LayOut(item, workspace, &pass);
    cudaError_t error = cudaMemsetAsync(workspace, 0, static_cast<size_t>(zeros), stream);
    if (error == cudaSuccess) error = Launch(item.kernel, pass, stream);
    if (error == cudaSuccess) continue;
    (void)cudaGetLastError();
    return Internal(
        ErrorText(error, "launching the backward pass of " + std::string(KernelName(item.kernel))));
  }
  return Status();
}

cudaError_t LaunchSm80Gradients(const BackwardPass& pass, cudaStream_t stream) {
  const Problem& p = pass.attention.problem;
  const bool f16 = p.dtype == DType::kFloat16;
  switch (ClassOf(p)) {
    case Sm80Class::kDropout:
      return f16 ? LaunchSm80DropoutF16(pass, stream) : LaunchSm80DropoutBf16(pass, stream);
    case Sm80Class::kGeneral:
      return f16 ? LaunchSm80GeneralF16(pass, stream) : LaunchSm80GeneralBf16(pass, stream);
    case Sm80Class::kPlain:
      break;
  }
  return f16 ? LaunchSm80PlainF16(pass, stream) : LaunchSm80PlainBf16(pass, stream);
}

cudaError_t LaunchSm90Gradients(const BackwardPass& pass, cudaStream_t stream) {
  return pass.attention.problem.dtype == DType::kFloat16 ? LaunchSm90GradientsF16(pass, stream)
                                                         : LaunchSm90GradientsBf16(pass, stream);
}

}  // namespace attend::cuda

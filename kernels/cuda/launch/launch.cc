// SPDX-License-Identifier: Apache-2.0
//
// A batch is grouped by compiled variant, one launch per group; launches of a stream run in order,
// so they share one workspace, sized for the largest. Aligned copies of Q, K and V are placed
// behind it and made first.

#include "kernels/cuda/launch/launch.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cuda/backward/backward.h"
#include "kernels/cuda/decode/decode.h"
#include "kernels/cuda/fp32/variants.h"
#include "kernels/cuda/launch/repack.h"
#include "kernels/cuda/naive/naive.h"
#include "kernels/cuda/ragged/ragged.h"
#include "kernels/cuda/ragged/tensor_maps.h"
#include "kernels/cuda/runtime/append_kernel.h"
#include "kernels/cuda/runtime/copy_kernel.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/sm80/variants.h"
#include "kernels/cuda/sm90/variants.h"

namespace attend::cuda {
namespace {

constexpr int64_t kAlignment = 256;

bool IsDecode(KernelId kernel) {
  return kernel == KernelId::kCudaDecodeSm80 || kernel == KernelId::kCudaDecodeSm90;
}

Status Failure(cudaError_t error, KernelId kernel) {
  (void)cudaGetLastError();
  return Internal(ErrorText(error, "launching " + std::string(KernelName(kernel))));
}

// A Tensor Core kernel's thread draws the bits of a tile of rows and keys at once. Unaligned rows
// would drop other weights than the contract says.
Status CheckDropout(const LaunchItem& item) {
  const bool sm90 = item.kernel == KernelId::kCudaFlashSm90;
  const Attention& a = item.attention;
  if (a.problem.dropout == 0 || (!sm90 && item.kernel != KernelId::kCudaFlashSm80)) return Status();
  const auto refusal = [&item](const char* field, int64_t value) {
    return InvalidArgument(std::string(field) + " is " + std::to_string(value) +
                           ", must be a multiple of 16 for dropout in " +
                           std::string(KernelName(item.kernel)));
  };
  if (sm90 && a.dropout.row % kDropoutTile != 0) return refusal("dropout.row", a.dropout.row);
  if (a.problem.key_offset % kDropoutTile != 0) return refusal("key_offset", a.problem.key_offset);
  return Status();
}

// Kernels are selected by the problem's flags of the bias, but read the bias by its own dtype: the
// two must agree.
Status CheckBias(const LaunchItem& item) {
  const Problem& p = item.attention.problem;
  if (!p.has_bias) return Status();
  const DType dtype = item.attention.bias.dtype;
  if (p.bias_bits != (dtype == DType::kBit) || p.bias_as_q != (dtype == p.dtype)) {
    return InvalidArgument("bias.dtype is " + std::string(DTypeName(dtype)) +
                           ", the problem says that it is " +
                           (p.bias_bits   ? "of bits"
                            : p.bias_as_q ? "q's"
                                          : "another than q's, and not of bits"));
  }
  if (item.kernel != KernelId::kCudaFlashSm90 || LoadsBias(item.attention)) return Status();
  return InvalidArgument(
      "the bias's rows do not begin at multiples of 16 bytes, as cuda_flash_sm90 needs");
}

// The requested variant, or the first that fits.
Result<const FlashVariant*> Choose(const LaunchItem& item, int block_bytes_max) {
  std::span<const FlashVariant> variants = VariantsFor(item.kernel, item.attention.problem);
  ATTEND_RETURN_IF_ERROR(CheckDropout(item));
  ATTEND_RETURN_IF_ERROR(CheckBias(item));
  const std::string name(KernelName(item.kernel));
  if (variants.empty()) return Internal(name + " was launched on a problem that it does not take");
  if (item.config != kDefaultConfig) {
    const auto count = static_cast<int>(variants.size());
    if (item.config < 0 || item.config >= count) {
      return InvalidArgument("config is " + std::to_string(item.config) +
                             ", must be -1 or in [0, " + std::to_string(count) + ") for " + name);
    }
    variants = variants.subspan(item.config, 1);
  }
  for (const FlashVariant& variant : variants) {
    if (variant.block_bytes <= block_bytes_max) return &variant;
  }
  return Unimplemented("no such variant of " + name + " fits the device's " +
                       std::to_string(block_bytes_max) + " bytes of shared memory per block");
}

// Items of one variant, in order. Variants with tensor maps need separate launches for items with
// paged keys and without.
struct Group {
  const FlashVariant* variant;
  KernelId kernel;
  bool pages_apart;
  std::vector<const Attention*> attentions;
};

Status AddToGroup(const LaunchItem& item, int block_bytes_max, std::vector<Group>* groups) {
  const Result<const FlashVariant*> variant = Choose(item, block_bytes_max);
  if (!variant.ok()) return variant.status();
  const bool pages_apart = (*variant)->tensor_maps && item.attention.problem.page_rows > 0;
  auto group = std::find_if(groups->begin(), groups->end(), [&](const Group& each) {
    return each.variant->kernel == (*variant)->kernel && each.pages_apart == pages_apart;
  });
  if (group == groups->end()) {
    groups->push_back({*variant, item.kernel, pages_apart, {}});
    group = groups->end() - 1;
  }
  group->attentions.push_back(&item.attention);
  return Status();
}

// Workspace bytes of the launches themselves, a multiple of 256.
Result<int64_t> KernelBytes(std::span<const LaunchItem> items) {
  // Launches run one after another and share the workspace.
  std::vector<const Problem*> ragged, decode;
  int64_t bytes = kTileQueueBytes;
  for (const LaunchItem& item : items) {
    if (item.kernel != KernelId::kCudaNaive) {
      (IsDecode(item.kernel) ? decode : ragged).push_back(&item.attention.problem);
      continue;
    }
    const Result<int64_t> scores = NaiveWorkspaceBytes(item.attention.problem);
    if (!scores.ok()) return scores;
    int64_t whole = 0;
    if (__builtin_add_overflow(*scores, kTileQueueBytes, &whole)) {
      return InvalidArgument("bytes of workspace overflow 64 bits: " + std::to_string(*scores) +
                             " for scores");
    }
    bytes = std::max(bytes, whole);
  }
  const Result<int64_t> list = RaggedWorkspaceBytes(ragged);
  if (!list.ok()) return list;
  const Result<int64_t> partials = DecodeWorkspaceBytes(decode);
  if (!partials.ok()) return partials;
  bytes = std::max({bytes, *list, *partials});
  if (__builtin_add_overflow(bytes, kAlignment - 1, &bytes)) {
    return InvalidArgument("bytes of workspace overflow 64 bits");
  }
  return bytes / kAlignment * kAlignment;
}

// Items that read copies of Q, K and V where their kernels need them, and the copies to make. No
// items: no copy is needed.
struct Copies {
  std::vector<LaunchItem> items;
  std::vector<RepackPiece> pieces;
};

// KernelBytes of these items must be OK.
Copies PlanCopies(std::span<const LaunchItem> items, void* workspace) {
  Copies copies;
  const auto copied = [](const LaunchItem& item) {
    return RepackBytes(item.kernel, item.attention) > 0;
  };
  if (std::none_of(items.begin(), items.end(), copied)) return copies;
  char* at = static_cast<char*>(workspace) + *KernelBytes(items);
  copies.items.assign(items.begin(), items.end());
  for (LaunchItem& item : copies.items) Repack(item.kernel, &item.attention, &at, &copies.pieces);
  return copies;
}

}  // namespace

std::span<const FlashVariant> VariantsFor(KernelId kernel, const Problem& problem) {
  switch (kernel) {
    case KernelId::kCudaFlashFp32:
      return Fp32VariantsFor(problem);
    case KernelId::kCudaFlashSm80:
      return Sm80VariantsFor(problem);
    case KernelId::kCudaFlashSm90:
      return Sm90VariantsFor(problem);
    case KernelId::kCudaDecodeSm80:
    case KernelId::kCudaDecodeSm90:
      return DecodeVariantsFor(kernel, problem);
    default:
      return {};
  }
}

Result<int64_t> BatchWorkspaceBytes(std::span<const LaunchItem> items) {
  if (items.empty()) return int64_t{0};
  const Result<int64_t> kernels = KernelBytes(items);
  if (!kernels.ok()) return kernels;
  int64_t bytes = *kernels;
  for (const LaunchItem& item : items) {
    if (__builtin_add_overflow(bytes, RepackBytes(item.kernel, item.attention), &bytes)) {
      return InvalidArgument("bytes of workspace overflow 64 bits: " + std::to_string(*kernels) +
                             " beside copies of Q, K and V");
    }
  }
  return bytes;
}

int64_t ListBytesMax(std::span<const LaunchItem> items) {
  int64_t bytes = 0;
  for (const LaunchItem& item : items) {
    const Problem* const problem = &item.attention.problem;
    const Result<int64_t> alone = RaggedWorkspaceBytes({&problem, 1});
    if (!alone.ok() || __builtin_add_overflow(bytes, *alone, &bytes)) return 0;
  }
  return bytes;
}

Status LaunchBatch(std::span<const LaunchItem> items, void* workspace, int64_t workspace_bytes,
                   cudaStream_t stream, const LaunchOptions& options) {
  if (items.empty()) return Status();
  const Result<int64_t> needed = BatchWorkspaceBytes(items);
  if (!needed.ok()) return needed.status();
  if (workspace_bytes < *needed) {
    return InvalidArgument("workspace_bytes is " + std::to_string(workspace_bytes) +
                           ", must be at least " + std::to_string(*needed));
  }
  int block_bytes_max = 0;
  cudaError_t error = ReadBlockBytesMax(&block_bytes_max);
  if (error != cudaSuccess) return Failure(error, items.front().kernel);
  const Copies copies = PlanCopies(items, workspace);
  if (!copies.items.empty()) items = copies.items;
  std::vector<Group> groups;
  for (const LaunchItem& item : items) {
    if (item.kernel == KernelId::kCudaNaive) {
      if (item.config != kDefaultConfig && item.config != 0) {
        return InvalidArgument("config is " + std::to_string(item.config) +
                               ", must be -1 or 0 for cuda_naive");
      }
    } else {
      ATTEND_RETURN_IF_ERROR(AddToGroup(item, block_bytes_max, &groups));
    }
  }
  error = LaunchRepack(copies.pieces, stream);
  if (error != cudaSuccess) return Failure(error, items.front().kernel);
  for (const Group& group : groups) {
    error = IsDecode(group.kernel)
                ? LaunchDecode(*group.variant, group.attentions, workspace, options, stream)
                : LaunchRagged(*group.variant, group.attentions, workspace, options, stream);
    if (error != cudaSuccess) return Failure(error, group.kernel);
  }
  float* scores = reinterpret_cast<float*>(static_cast<char*>(workspace) + kTileQueueBytes);
  for (const LaunchItem& item : items) {
    if (item.kernel != KernelId::kCudaNaive) continue;
    error = LaunchNaive(item.attention, scores, stream);
    if (error != cudaSuccess) return Failure(error, item.kernel);
  }
  return Status();
}

cudaError_t LoadKernels() {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) error = LoadCopy();
  if (error == cudaSuccess) error = LoadAppend();
  if (error == cudaSuccess) error = LoadRepack();
  if (error == cudaSuccess) error = LoadRagged();
  if (error == cudaSuccess) error = LoadNaive();
  if (error == cudaSuccess) error = LoadFp32();
  if (error == cudaSuccess && major >= 8) error = LoadSm80();
  if (error == cudaSuccess && major >= 8) error = LoadDecode(KernelId::kCudaDecodeSm80);
  if (error == cudaSuccess && major == 9) error = LoadSm90();
  if (error == cudaSuccess && major == 9) error = LoadDecode(KernelId::kCudaDecodeSm90);
  if (error == cudaSuccess) error = LoadBackward(major);
  return error;
}

}  // namespace attend::cuda

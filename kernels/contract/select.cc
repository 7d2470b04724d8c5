// SPDX-License-Identifier: Apache-2.0
//
// Kernels are tried from the most specialised to the most general: decoding, sm90, sm80, fp32. Each
// has a predicate WhyNot... that returns "" or the reason why it cannot run; the reason that
// excluded the faster kernel becomes the selected one's `why`. Which kernel runs depends on the
// problem, the device and the memory's traits alone, never on the load, so that results are
// reproducible bit for bit.

#include "kernels/contract/select.h"

#include <algorithm>
#include <cmath>

#include "kernels/contract/decode_rule.h"
#include "kernels/contract/gradient_terms.h"
#include "kernels/contract/limits.h"

namespace attend {
namespace {

constexpr bool IsAuto(std::string_view forced) { return forced.empty() || forced == "auto"; }

const KernelInfo* Find(std::string_view name) {
  for (const KernelInfo& kernel : Kernels()) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

// Kernels of one kind of device, for error messages.
std::string KernelNames(DeviceKind device) {
  std::string names = "auto";
  for (const KernelInfo& kernel : Kernels()) {
    if (kernel.device == device) names += ", " + std::string(kernel.name);
  }
  return names;
}

// The kernel that was requested by name, if it runs on this kind of device.
Result<const KernelInfo*> FindForced(std::string_view forced, const DeviceInfo& device) {
  const KernelInfo* kernel = Find(forced);
  if (kernel == nullptr) {
    return InvalidArgument("kernel is \"" + std::string(forced.substr(0, 64)) +
                           "\", must be one of " + KernelNames(device.kind));
  }
  if (kernel->device != device.kind) {
    return Unimplemented("kernel " + std::string(kernel->name) + " does not run on " + device.name);
  }
  return kernel;
}

// `kernel` is null for automatic selection.
Status CheckDType(const Problem& problem, const KernelInfo* kernel) {
  if (problem.dtype != DType::kFloat64) return Status();
  if (kernel != nullptr && kernel->id == KernelId::kCpuReference) return Status();
  return Unimplemented("float64 is computed only by cpu_reference, which must be named");
}

// Why a kernel cannot compute a problem, or why one was chosen.
struct Reason {
  std::string_view words;  // empty: it can compute it
  Fallback fallback = Fallback::kNone;
  bool empty() const { return words.empty(); }
};

Result<Selection> Fit(const KernelInfo& kernel, const Problem& problem, const DeviceInfo& device,
                      const MemoryTraits& memory, const Reason& why) {
  const int64_t copy_bytes = ReadsAligned(kernel.id) ? memory.repack_bytes : 0;
  Selection selection{kernel.id, why.words, copy_bytes,
                      copy_bytes > 0 ? Fallback::kAlignedCopy : why.fallback};
  if (kernel.id == KernelId::kCudaNaive) {
    const Result<int64_t> bytes = NaiveWorkspaceBytes(problem);
    if (!bytes.ok() || *bytes > device.workspace_bytes_max) {
      return Unimplemented(
          "kernel cuda_naive keeps the whole score matrix: " +
          (bytes.ok() ? std::to_string(*bytes) + " bytes" : "more than 64 bits can count") +
          ", the limit on " + device.name + " is " + std::to_string(device.workspace_bytes_max));
    }
    selection.workspace_bytes = *bytes;
  }
  return selection;
}

Result<Selection> FitBackward(KernelId id, const Problem& problem, const DeviceInfo& device,
                              const Reason& why) {
  Selection selection{id, why.words, 0, why.fallback};
  if (device.kind == DeviceKind::kCpu) return selection;
  const auto fits = [&](const Result<int64_t>& bytes) {
    selection.workspace_bytes = bytes.ok() ? *bytes : 0;
    return bytes.ok() && *bytes <= device.workspace_bytes_max;
  };
  if (id == KernelId::kCudaFlashSm90 && TakesTurns(problem)) {
    // If the device has no room for turns, use the kernels that need less.
    if (fits(TurnWorkspaceBytes(problem))) return selection;
  }
  const Result<int64_t> bytes = GradientTermsBytes(problem);
  if (fits(bytes)) return selection;
  return Unimplemented(
      "the backward pass needs " +
      (bytes.ok() ? std::to_string(*bytes) + " bytes" : "more bytes than 64 bits can count") +
      " of workspace (four floats per query row); " + device.name + " allows " +
      std::to_string(device.workspace_bytes_max));
}

// Why cpu_flash_amx cannot compute the problem; "" if it can.
Reason WhyNotAmx(const Problem& p, const DeviceInfo& device) {
  if (p.dtype != DType::kBFloat16) return {"AMX tiles take bf16, and would round other dtypes"};
  if (!device.not_amx.empty()) return {device.not_amx};
  if (!(std::abs(p.scale) <= kFlushedScaleMax)) {
    return {"cpu_flash_amx takes a scale of up to 2^20", Fallback::kScale};
  }
  return {};
}

// The same for its backward pass.
Reason WhyNotAmxBackward(const Problem& p, const DeviceInfo& device) {
  const Reason why_not = WhyNotAmx(p, device);
  if (!why_not.empty() || p.o_dtype() == p.dtype) return why_not;
  return {"the backward pass of cpu_flash_amx takes O in bf16", Fallback::kFloat32Output};
}

// `not_amx`: why not cpu_flash_amx. It needs more than `few` rows of a KV head.
Selection SelectCpu(const Problem& p, const Reason& not_amx, int64_t few) {
  if (p.dtype != DType::kBFloat16) {
    return {KernelId::kCpuFlash, "the fast kernel of the CPU takes any problem", 0};
  }
  if (!not_amx.empty()) return {KernelId::kCpuFlash, not_amx.words, 0, not_amx.fallback};
  if (p.heads_kv == 0 || p.len_q <= few / p.group()) {
    return {KernelId::kCpuFlash, "few query rows: they would leave most of a tile empty", 0};
  }
  return {KernelId::kCpuFlashAmx, "AMX tiles are the fastest on this CPU", 0};
}

constexpr int kSm80 = 80;
constexpr int kSm90 = 90;
constexpr int kBeyondHopper = 100;

bool IsHopper(const DeviceInfo& device) {
  return device.compute_capability >= kSm90 && device.compute_capability < kBeyondHopper;
}

constexpr int64_t kSm90PagesDimMax = 192;    // as in sm90/variants.h
constexpr int64_t kSm90DropoutDimMax = 128;  // likewise
constexpr int64_t kSm90BiasDimMax = 128;     // likewise
constexpr int64_t kSm90GeneralDimMax = 128;  // likewise
// The kernel takes no shift off capped scores (cuda/backward/pass.h). In powers of two they are up
// to 369, and LSE of 2^30 keys is up to 399. That is beyond kShiftedLse but below 512, so rounding
// it to fp32 still moves weights by 2^-16 at most.
constexpr float kSm90BackwardSoftcapMax = 256.0f;

bool Has16Bits(const Problem& p) { return DTypeBytes(p.dtype) == 2; }

// Limits of decoding, in query rows of all query heads of one KV head. Beyond kDecodeRowsFew the
// flash kernels are faster where few heads share a KV head. With too few keys there is not enough
// work to split over a device.
constexpr int64_t kDecodeLengthMost = 512;  // query rows of one head
constexpr int64_t kDecodeRowsFew = 64;
constexpr int64_t kDecodeRowsFewest = 8;
constexpr int64_t kWgmmaRowsMin = 17;  // with fewer rows mma is as fast
constexpr int64_t kDecodeKeysMin = 512;
constexpr int64_t kFewestRowsKeysMin = 64;
constexpr int64_t kManyRowsGroupMin = 4;
constexpr int64_t kManyRowsKeysMin = 2048;
// Rows that decoding multiplies together, a chunk, and those of a flash kernel's tile, all of one
// head. A chunk takes up to twice a tile's time per key.
constexpr int64_t kChunkRows = 128;
constexpr int64_t kFlashRows = 128;
constexpr int64_t kChunkTiles = 2;
// Elsewhere a block's shared memory may not have room for a chunk of longer rows.
constexpr int64_t kChunkDimMax = 128;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether chunks take no longer than tiles that fill the device. With fewer sequences tiles leave
// multiprocessors idle and take longer, but how many there are must not change a sequence's bits.
bool ChunksPay(const Problem& p, const DeviceInfo& device) {
  const int64_t chunks = DivideUp(p.len_q * p.group(), kChunkRows);
  if (chunks > 1 && !IsHopper(device) && std::max(p.dim, p.dim_v) > kChunkDimMax) return false;
  return kChunkTiles * chunks <= p.group() * DivideUp(p.len_q, kFlashRows) &&
         (p.page_rows > 0 || p.len_k >= kManyRowsKeysMin * chunks);
}

bool IsDecode(const Problem& p, const DeviceInfo& device) {
  if (p.heads_kv == 0 || p.len_q == 0 || p.len_q > kDecodeLengthMost) return false;
  const int64_t rows = p.len_q * p.group();
  if (rows > kDecodeRowsFew) return p.group() >= kManyRowsGroupMin && ChunksPay(p, device);
  // In pages, a request's sequences are sessions: one's length must not change the kernel, and so
  // the bits, of another.
  if (p.page_rows > 0) return true;
  return p.len_k >= (rows <= kDecodeRowsFewest ? kFewestRowsKeysMin : kDecodeKeysMin);
}

std::string_view BestDecode(const Problem& p, const DeviceInfo& device) {
  const bool wgmma = IsHopper(device) && p.len_q * p.group() >= kWgmmaRowsMin;
  return wgmma ? "cuda_decode_sm90" : "cuda_decode_sm80";
}

// Why Tensor Core kernels cannot apply the problem's dropout; "" if they can or there is none.
Reason WhyNotDrop(const Problem& p) {
  if (p.dropout == 0) return {};
  if (p.page_rows > 0) {
    return {"Tensor Core kernels have no dropout with keys in pages", Fallback::kDropout};
  }
  if (p.key_offset % kDropoutTile == 0) return {};
  // One thread draws the bits of 16 keys at a time.
  return {"dropout on Tensor Cores needs a key_offset that is a multiple of 16",
          Fallback::kDropout};
}

// Why the kernel cannot compute the problem; "" if it can.
Reason WhyNotSm80(const Problem& p, const DeviceInfo& device) {
  if (device.compute_capability < kSm80) {
    return {"cuda_flash_sm80 needs compute capability 8.0 or later"};
  }
  if (!Has16Bits(p)) return {"Tensor Cores would round float32 inputs"};
  return WhyNotDrop(p);
}

// Why cuda_flash_sm90 cannot apply the problem's bias; "" if it can or there is none.
Reason WhyNotSm90Bias(const Problem& p) {
  if (!p.has_bias) return {};
  if (!p.bias_bits && !p.bias_as_q) {
    return {"cuda_flash_sm90 takes a bias of q's dtype or a mask of bits, no other bias",
            Fallback::kBias};
  }
  if (p.page_rows > 0) return {"cuda_flash_sm90 has no bias for keys in pages", Fallback::kBias};
  if (p.dropout > 0) return {"cuda_flash_sm90 has no bias with dropout", Fallback::kBias};
  if (std::max(p.dim, p.dim_v) > kSm90BiasDimMax) {
    return {"cuda_flash_sm90 has a bias up to a D and Dv of 128", Fallback::kBias};
  }
  return {};
}

// Why Hopper's kernels can read neither Q, K and V nor a copy of them; "" if they can.
Reason WhyNotRead(const DeviceInfo& device, const MemoryTraits& memory) {
  const bool copied = memory.repack_bytes > 0 && memory.repack_bytes <= device.workspace_bytes_max;
  return copied ? Reason() : Reason{memory.not_tma, Fallback::kAlignment};
}

Reason WhyNotSm90(const Problem& p, const DeviceInfo& device, const MemoryTraits& memory) {
  if (!IsHopper(device)) {
    return {"cuda_flash_sm90 needs compute capability 9.x (Hopper)"};
  }
  if (!Has16Bits(p)) return {"Tensor Cores would round float32 inputs"};
  const int64_t most = std::max(p.dim, p.dim_v);
  if (p.page_rows > 0 && most > kSm90PagesDimMax) {
    return {"cuda_flash_sm90 reads K and V in pages up to a D and Dv of 192", Fallback::kPages};
  }
  if (!WhyNotSm90Bias(p).empty()) return WhyNotSm90Bias(p);
  const bool general = !p.has_bias && p.dropout == 0 && most <= kSm90GeneralDimMax;
  if (p.o_float32 && !general) {
    return {
        "cuda_flash_sm90 writes O in float32 up to a D and Dv of 128, and not with a bias or "
        "dropout",
        Fallback::kFloat32Output};
  }
  if (p.has_alibi && !general) {
    return {"cuda_flash_sm90 has ALiBi up to a D and Dv of 128, and not with a bias or dropout",
            Fallback::kAlibi};
  }
  if (p.dropout > 0 && most > kSm90DropoutDimMax) {
    return {"cuda_flash_sm90 has dropout up to a D and Dv of 128", Fallback::kDropout};
  }
  if (!WhyNotDrop(p).empty()) return WhyNotDrop(p);
  if (!(p.scale >= kLateScaleMin && p.scale <= kLateScaleMax)) {
    return {"cuda_flash_sm90 needs a scale of 2^-20 to 2^20", Fallback::kScale};
  }
  return WhyNotRead(device, memory);
}

Reason WhyNotSm90Backward(const Problem& p, const DeviceInfo& device, const MemoryTraits& memory) {
  const Reason why_not = WhyNotSm90(p, device, memory);
  if (!why_not.empty()) return why_not;
  if (!memory.not_tma.empty()) return {memory.not_tma, Fallback::kAlignment};  // it makes no copy
  if (p.has_bias) return {"the backward pass of cuda_flash_sm90 has no bias", Fallback::kBias};
  if (p.has_alibi) return {"the backward pass of cuda_flash_sm90 has no ALiBi", Fallback::kAlibi};
  if (p.o_float32) return {"Tensor Cores would round float32 gradients of O"};
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) {
    return {"the backward pass of cuda_flash_sm90 needs D and Dv that are multiples of 8",
            Fallback::kHeadDim};
  }
  if (p.softcap > kSm90BackwardSoftcapMax) {
    return {"the backward pass of cuda_flash_sm90 takes a softcap of up to 256",
            Fallback::kSoftcap};
  }
  return {};
}

Reason WhyNotSm80Backward(const Problem& p, const DeviceInfo& device) {
  const Reason why_not = WhyNotSm80(p, device);
  if (!why_not.empty()) return why_not;
  if (p.o_float32) return {"Tensor Cores would round float32 gradients of O"};
  return {};
}

// True of either kernel.
Reason WhyNotDecode(const Problem& p, const DeviceInfo& device, const MemoryTraits& memory) {
  if (device.compute_capability < kSm80) {
    return {"decoding kernels need compute capability 8.0 or later"};
  }
  if (!Has16Bits(p)) return {"Tensor Cores would round float32 inputs"};
  if (p.has_bias && !p.bias_bits) {
    return {"decoding kernels take no bias except a mask of bits", Fallback::kBias};
  }
  if (p.dropout > 0) return {"decoding kernels have no dropout", Fallback::kDropout};
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) {
    return {"decoding kernels need D and Dv that are multiples of 8", Fallback::kHeadDim};
  }
  if (p.len_q > kDecodeLengthMost) return {"decoding kernels take at most 512 query rows"};
  // 16-byte copies (cp.async) have the same alignment rules as TMA.
  if (!WhyNotRead(device, memory).empty())
    return {"decoding kernels need rows on 16-byte boundaries", Fallback::kAlignment};
  return {};
}

Reason WhyNotDecodeSm90(const Problem& p, const DeviceInfo& device, const MemoryTraits& memory) {
  if (!IsHopper(device)) return {"cuda_decode_sm90 needs compute capability 9.x (Hopper)"};
  return WhyNotDecode(p, device, memory);
}

// `why` is the reason that excluded a faster kernel.
Result<Selection> SelectCuda(const Problem& problem, const DeviceInfo& device,
                             const MemoryTraits& memory) {
  Fallback fallback = Fallback::kNone;
  if (IsDecode(problem, device)) {
    const Reason not_decode = WhyNotDecode(problem, device, memory);
    fallback = not_decode.fallback;
    if (not_decode.empty()) {
      return Fit(*Find(BestDecode(problem, device)), problem, device, memory,
                 {memory.repack_bytes > 0
                      ? "few query rows against long K and V, which are copied to 16-byte "
                        "boundaries first: that takes twice as long as reading them"
                      : "few query rows against long K and V: reading them takes the time"});
    }
  }
  const Reason not_sm90 = WhyNotSm90(problem, device, memory);
  if (not_sm90.empty()) {
    return Fit(*Find("cuda_flash_sm90"), problem, device, memory,
               {memory.repack_bytes > 0
                    ? "wgmma and TMA are the fastest on Hopper; Q, K and V are copied to 16-byte "
                      "boundaries first"
                    : "wgmma and TMA are the fastest on Hopper, and the kernel supports every "
                      "requested option",
                fallback});
  }
  const Reason not_sm80 = WhyNotSm80(problem, device);
  if (not_sm80.empty()) return Fit(*Find("cuda_flash_sm80"), problem, device, memory, not_sm90);
  return Fit(*Find("cuda_flash_fp32"), problem, device, memory, not_sm80);
}

}  // namespace

Result<int64_t> NaiveWorkspaceBytes(const Problem& p) {
  const Result<int64_t> heads = CheckedProduct("scores", p.batch, p.heads_q, 4);
  if (!heads.ok()) return heads;
  return CheckedProduct("bytes of scores", *heads, p.len_q, p.len_k);
}

Result<Selection> Select(const Problem& problem, const DeviceInfo& device,
                         std::string_view forced) {
  return Select(problem, device, forced, ContiguousTraits(problem));
}

Result<Selection> Select(const Problem& problem, const DeviceInfo& device, std::string_view forced,
                         const MemoryTraits& memory) {
  if (IsAuto(forced)) {
    ATTEND_RETURN_IF_ERROR(CheckDType(problem, nullptr));
    if (device.kind == DeviceKind::kCuda) return SelectCuda(problem, device, memory);
    return SelectCpu(problem, WhyNotAmx(problem, device), kDecodeRowsAlways);
  }
  const Result<const KernelInfo*> found = FindForced(forced, device);
  if (!found.ok()) return found.status();
  const KernelInfo* kernel = *found;
  ATTEND_RETURN_IF_ERROR(CheckDType(problem, kernel));
  Reason why_not;
  if (kernel->id == KernelId::kCpuFlashAmx) why_not = WhyNotAmx(problem, device);
  if (kernel->id == KernelId::kCudaFlashSm80) why_not = WhyNotSm80(problem, device);
  if (kernel->id == KernelId::kCudaFlashSm90) why_not = WhyNotSm90(problem, device, memory);
  if (kernel->id == KernelId::kCudaDecodeSm80) why_not = WhyNotDecode(problem, device, memory);
  if (kernel->id == KernelId::kCudaDecodeSm90) why_not = WhyNotDecodeSm90(problem, device, memory);
  if (!why_not.empty()) {
    return Unimplemented("kernel " + std::string(kernel->name) + " cannot compute this on " +
                         device.name + ": " + std::string(why_not.words));
  }
  return Fit(*kernel, problem, device, memory, {"asked for by name"});
}

Result<Selection> SelectBackward(const Problem& problem, const DeviceInfo& device,
                                 std::string_view forced) {
  return SelectBackward(problem, device, forced, ContiguousTraits(problem));
}

Result<Selection> SelectBackward(const Problem& problem, const DeviceInfo& device,
                                 std::string_view forced, const MemoryTraits& memory) {
  const Reason not_sm90 = WhyNotSm90Backward(problem, device, memory);
  const Reason not_sm80 = WhyNotSm80Backward(problem, device);
  if (IsAuto(forced)) {
    ATTEND_RETURN_IF_ERROR(CheckDType(problem, nullptr));
    if (device.kind == DeviceKind::kCpu) {
      return SelectCpu(problem, WhyNotAmxBackward(problem, device), kDecodeRows);
    }
    if (not_sm90.empty()) {
      return FitBackward(
          KernelId::kCudaFlashSm90, problem, device,
          {"wgmma and TMA are the fastest on Hopper, and support every requested option"});
    }
    if (not_sm80.empty()) return FitBackward(KernelId::kCudaFlashSm80, problem, device, not_sm90);
    return FitBackward(KernelId::kCudaFlashFp32, problem, device, not_sm80);
  }
  const Result<const KernelInfo*> kernel = FindForced(forced, device);
  if (!kernel.ok()) return kernel.status();
  ATTEND_RETURN_IF_ERROR(CheckDType(problem, *kernel));
  const KernelId id = (*kernel)->id;
  Reason why_not;
  if (id == KernelId::kCpuFlashAmx) why_not = WhyNotAmxBackward(problem, device);
  if (id == KernelId::kCudaFlashSm80) why_not = not_sm80;
  if (id == KernelId::kCudaFlashSm90) why_not = not_sm90;
  if (id == KernelId::kCudaNaive || id == KernelId::kCudaDecodeSm80 ||
      id == KernelId::kCudaDecodeSm90) {
    why_not = {"it has none"};
  }
  if (why_not.empty()) return FitBackward(id, problem, device, {"asked for by name"});
  return Unimplemented("kernel " + std::string((*kernel)->name) +
                       " cannot compute this backward pass on " + device.name + ": " +
                       std::string(why_not.words));
}

}  // namespace attend

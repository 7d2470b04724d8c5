// SPDX-License-Identifier: Apache-2.0

#include "kernels/c/attend_c.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/c/attend_c_status.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"
#include "kernels/cuda/launch/launch.h"
#include "kernels/cuda/runtime/cuda_status.h"
#include "kernels/cuda/runtime/device_scope.h"

namespace attend {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

ConstTensorView Const(const attend_tensor& t) {
  return {t.data, t.stride_b, t.stride_h, t.stride_l};
}

Status CheckRange(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + ", must be in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

Status CheckStructBytes(const attend_params& params) {
  if (params.struct_bytes == sizeof(attend_params)) return Status();
  return InvalidArgument("struct_bytes is " + std::to_string(params.struct_bytes) +
                         ", this library's attend_params has " +
                         std::to_string(sizeof(attend_params)));
}

Status ReadProblem(const attend_params* params, Problem* p) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  ATTEND_RETURN_IF_ERROR(CheckStructBytes(*params));
  ATTEND_RETURN_IF_ERROR(CheckRange("dtype", params->dtype, ATTEND_FLOAT16, ATTEND_FLOAT32));
  if (params->o_dtype != 0 && params->o_dtype != params->dtype &&
      params->o_dtype != ATTEND_FLOAT32) {
    return InvalidArgument("o_dtype is " + std::to_string(params->o_dtype) + ", must be dtype " +
                           std::to_string(params->dtype) + " (or 0) or ATTEND_FLOAT32");
  }
  ATTEND_RETURN_IF_ERROR(
      CheckRange("alignment", params->alignment, ATTEND_BOTTOM_RIGHT, ATTEND_TOP_LEFT));
  if (params->bias != nullptr) {
    ATTEND_RETURN_IF_ERROR(
        CheckRange("bias_dtype", params->bias_dtype, ATTEND_FLOAT16, ATTEND_FLOAT32));
  }
  p->dtype = static_cast<DType>(params->dtype);
  p->o_float32 = params->o_dtype == ATTEND_FLOAT32;
  p->batch = params->batch;
  p->heads_q = params->heads_q;
  p->heads_kv = params->heads_kv;
  p->len_q = params->len_q;
  p->len_k = params->len_k;
  p->dim = params->dim;
  p->dim_v = params->dim_v;
  p->packed = params->packed != 0;
  p->total_q = params->total_q;
  p->total_k = params->total_k;
  p->page_rows = params->page_rows;
  p->mask.alignment = static_cast<Alignment>(params->alignment);
  p->mask.left = params->window_left;
  p->mask.right = params->window_right;
  p->scale = params->scale;
  p->softcap = params->softcap;
  p->has_bias = params->bias != nullptr;
  p->has_alibi = params->alibi_slopes != nullptr;
  p->has_sinks = params->sinks != nullptr;
  p->return_lse = params->lse != nullptr;
  return Check(*p);
}

Status CheckMemory(const attend_params& params, const Problem& p) {
  const struct {
    const char* name;
    const void* data;
    int64_t elements;
  } tensors[] = {{"q", params.q.data, ElementsQ(p)},
                 {"k", params.k.data, ElementsK(p)},
                 {"v", params.v.data, ElementsV(p)},
                 {"o", params.o.data, ElementsO(p)}};
  for (const auto& tensor : tensors) {
    if (tensor.data == nullptr && tensor.elements > 0) {
      return InvalidArgument(std::string(tensor.name) + " is NULL, but has " +
                             std::to_string(tensor.elements) + " elements");
    }
  }
  if (p.packed && (params.q_offsets == nullptr || params.kv_offsets == nullptr)) {
    return InvalidArgument("packed needs q_offsets and kv_offsets, one is NULL");
  }
  if (p.page_rows > 0 && params.kv_pages == nullptr) {
    return InvalidArgument("kv_pages is NULL, but page_rows is " + std::to_string(p.page_rows));
  }
  return Status();
}

Attention ReadAttention(const attend_params& params, const Problem& p) {
  Attention a;
  a.problem = p;
  a.q = Const(params.q);
  a.k = Const(params.k);
  a.v = Const(params.v);
  a.o = {params.o.data, params.o.stride_b, params.o.stride_h, params.o.stride_l};
  a.lse = params.lse;
  a.lse_stride_b = params.lse_stride_b;
  a.lse_stride_h = params.lse_stride_h;
  a.bias.data = params.bias;
  if (p.has_bias) a.bias.dtype = static_cast<DType>(params.bias_dtype);
  a.bias.stride_b = params.bias_stride_b;
  a.bias.stride_h = params.bias_stride_h;
  a.bias.stride_q = params.bias_stride_q;
  a.alibi_slopes = params.alibi_slopes;
  a.alibi_stride_b = params.alibi_stride_b;
  a.sinks = params.sinks;
  a.q_lengths = params.q_lengths;
  a.kv_lengths = params.kv_lengths;
  a.q_offsets = params.q_offsets;
  a.kv_offsets = params.kv_offsets;
  a.kv_pages = {params.kv_pages, params.kv_pages_stride};
  return a;
}

// Memory is the caller's here, so no limit but the caller's own refuses a kernel.
Result<DeviceInfo> ReadDevice(int index) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.index = index;
  device.name = "cuda:" + std::to_string(index);
  device.workspace_bytes_max = INT64_MAX;
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Internal(cuda::ErrorText(error, "reading device " + device.name));
  }
  device.compute_capability = major * 10 + minor;
  return device;
}

Result<Selection> SelectFor(const attend_params& params, const Problem& p,
                            const DeviceInfo& device) {
  const MemoryTraits memory{.not_tma = cuda::WhyNotTma(ReadAttention(params, p))};
  return Select(p, device, params.kernel == nullptr ? "" : params.kernel, memory);
}

Result<Selection> SelectFor(const attend_params& params, const Problem& p) {
  const Result<DeviceInfo> device = ReadDevice(params.device);
  if (!device.ok()) return device.status();
  return SelectFor(params, p, *device);
}

// Puts which of several params a fault belongs to before it.
Status At(int32_t index, int32_t count, const Status& status) {
  if (status.ok() || count == 1) return status;
  return Status(status.code(), "params[" + std::to_string(index) + "]: " + status.message());
}

enum class Memory { kIgnored, kChecked };

// What the launcher takes. All arguments are checked before the device is asked anything.
Result<std::vector<cuda::LaunchItem>> ReadItems(const attend_params* params, int32_t count,
                                                Memory memory) {
  ATTEND_RETURN_IF_ERROR(CheckRange("count", count, 0, INT32_MAX));
  if (count > 0 && params == nullptr) return InvalidArgument("params is NULL");
  std::vector<cuda::LaunchItem> items;  // grows with what has been read, whatever `count` says
  if (count == 0) return items;
  for (int32_t n = 0; n < count; ++n) {
    Problem p;
    ATTEND_RETURN_IF_ERROR(At(n, count, ReadProblem(&params[n], &p)));
    if (params[n].device != params[0].device) {
      return InvalidArgument("params[" + std::to_string(n) + "].device is " +
                             std::to_string(params[n].device) + ", must be params[0].device, " +
                             std::to_string(params[0].device));
    }
    if (memory == Memory::kChecked) {
      ATTEND_RETURN_IF_ERROR(At(n, count, CheckMemory(params[n], p)));
    }
    items.push_back({.attention = ReadAttention(params[n], p), .config = params[n].config});
  }
  const Result<DeviceInfo> device = ReadDevice(params[0].device);
  if (!device.ok()) return device.status();
  for (int32_t n = 0; n < count; ++n) {
    const Result<Selection> selection = SelectFor(params[n], items[n].attention.problem, *device);
    if (!selection.ok()) return At(n, count, selection.status());
    items[n].kernel = selection->kernel;
  }
  return items;
}

Status CheckWorkspace(const void* workspace, int64_t bytes, int64_t needed) {
  if (needed > 0 && (workspace == nullptr || bytes < needed)) {
    return InvalidArgument("workspace_bytes is " + std::to_string(bytes) +
                           (workspace == nullptr ? " at NULL" : "") + ", must be at least " +
                           std::to_string(needed));
  }
  const uintptr_t beyond = reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment;
  if (needed > 0 && beyond != 0) {
    return InvalidArgument("workspace is " + std::to_string(beyond) + " bytes past a multiple of " +
                           std::to_string(kWorkspaceAlignment) + ", must be aligned to it");
  }
  return Status();
}

Status RunBatch(const attend_params* params, int32_t count, void* workspace,
                int64_t workspace_bytes, void* stream) {
  const Result<std::vector<cuda::LaunchItem>> items = ReadItems(params, count, Memory::kChecked);
  if (!items.ok()) return items.status();
  if (items->empty()) return Status();
  const Result<int64_t> needed = cuda::BatchWorkspaceBytes(*items);
  if (!needed.ok()) return needed.status();
  ATTEND_RETURN_IF_ERROR(CheckWorkspace(workspace, workspace_bytes, *needed));
  const cuda::DeviceScope scope(params[0].device);
  ATTEND_RETURN_IF_ERROR(cuda::ToStatus(scope.error(), "changing the device"));
  return cuda::LaunchBatch(*items, workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
}

Status Run(const attend_params* params, void* stream) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  // The size first: fields at the end may not be there.
  ATTEND_RETURN_IF_ERROR(CheckStructBytes(*params));
  return RunBatch(params, 1, params->workspace, params->workspace_bytes, stream);
}

Status WorkspaceBytes(const attend_params* params, int32_t count, int64_t* bytes) {
  if (bytes == nullptr) return InvalidArgument("bytes is NULL");
  const Result<std::vector<cuda::LaunchItem>> items = ReadItems(params, count, Memory::kIgnored);
  if (!items.ok()) return items.status();
  const Result<int64_t> needed = cuda::BatchWorkspaceBytes(*items);
  if (!needed.ok()) return needed.status();
  *bytes = *needed;
  return Status();
}

Result<Selection> SelectionFor(const attend_params* params) {
  Problem p;
  ATTEND_RETURN_IF_ERROR(ReadProblem(params, &p));
  return SelectFor(*params, p);
}

Result<std::span<const cuda::FlashVariant>> VariantsFor(const attend_params* params) {
  Problem p;
  ATTEND_RETURN_IF_ERROR(ReadProblem(params, &p));
  const Result<Selection> selection = SelectFor(*params, p);
  if (!selection.ok()) return selection.status();
  const std::span<const cuda::FlashVariant> variants = cuda::VariantsFor(selection->kernel, p);
  if (!variants.empty()) return variants;
  static const cuda::FlashVariant only = [] {
    cuda::FlashVariant variant;
    variant.name = "the_only_one";
    return variant;
  }();
  return std::span<const cuda::FlashVariant>(&only, 1);
}

}  // namespace
}  // namespace attend

int32_t attend_run(const attend_params* params, void* stream) {
  return attend::Return(attend::Run(params, stream));
}

int32_t attend_run_batch(const attend_params* params, int32_t count, void* workspace,
                         int64_t workspace_bytes, void* stream) {
  return attend::Return(attend::RunBatch(params, count, workspace, workspace_bytes, stream));
}

int32_t attend_workspace_bytes(const attend_params* params, int64_t* bytes) {
  return attend::Return(attend::WorkspaceBytes(params, 1, bytes));
}

int32_t attend_batch_workspace_bytes(const attend_params* params, int32_t count, int64_t* bytes) {
  return attend::Return(attend::WorkspaceBytes(params, count, bytes));
}

int32_t attend_select(const attend_params* params, const char** kernel, const char** why) {
  const attend::Result<attend::Selection> selection = attend::SelectionFor(params);
  if (!selection.ok()) return attend::Return(selection.status());
  // Both are static strings, terminated.
  if (kernel != nullptr) *kernel = attend::KernelName(selection->kernel).data();
  if (why != nullptr) *why = selection->why.data();
  return ATTEND_OK;
}

int32_t attend_configs(const attend_params* params, int32_t* count) {
  const auto variants = attend::VariantsFor(params);
  if (!variants.ok()) return attend::Return(variants.status());
  if (count == nullptr) return attend::Return(attend::InvalidArgument("count is NULL"));
  *count = static_cast<int32_t>(variants->size());
  return ATTEND_OK;
}

const char* attend_config_name(const attend_params* params, int32_t config) {
  const auto variants = attend::VariantsFor(params);
  if (!variants.ok()) {
    (void)attend::Return(variants.status());
    return "";
  }
  if (config < 0 || config >= static_cast<int32_t>(variants->size())) return "";
  return (*variants)[config].name.data();  // a static string, terminated
}

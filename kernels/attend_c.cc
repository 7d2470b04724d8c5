// SPDX-License-Identifier: Apache-2.0

#include "kernels/attend_c.h"

#include <cuda_runtime_api.h>

#include <span>
#include <string>

#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/flash_fp32.h"
#include "kernels/cuda/launch.h"
#include "kernels/problem.h"
#include "kernels/select.h"

namespace attend {
namespace {

thread_local std::string last_error;

int32_t Return(const Status& status) {
  if (status.ok()) return ATTEND_OK;
  last_error = status.message();
  return static_cast<int32_t>(status.code());
}

// The calling thread's current device, put back when this goes.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) error_ = cudaSetDevice(device);
  }
  ~DeviceScope() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  cudaError_t error() const { return error_; }

 private:
  int before_ = -1;
  cudaError_t error_ = cudaSuccess;
};

ConstTensorView Const(const attend_tensor& t) {
  return {t.data, t.stride_b, t.stride_h, t.stride_l};
}

Status CheckEnum(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return InvalidArgument(std::string(field) + " is " + std::to_string(value) + ", must be in [" +
                         std::to_string(low) + ", " + std::to_string(high) + "]");
}

Status ReadProblem(const attend_params* params, Problem* p) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  if (params->struct_bytes != sizeof(attend_params)) {
    return InvalidArgument("struct_bytes is " + std::to_string(params->struct_bytes) +
                           ", this library's attend_params has " +
                           std::to_string(sizeof(attend_params)));
  }
  ATTEND_RETURN_IF_ERROR(CheckEnum("dtype", params->dtype, ATTEND_FLOAT16, ATTEND_FLOAT32));
  ATTEND_RETURN_IF_ERROR(
      CheckEnum("alignment", params->alignment, ATTEND_BOTTOM_RIGHT, ATTEND_TOP_LEFT));
  if (params->bias != nullptr) {
    ATTEND_RETURN_IF_ERROR(
        CheckEnum("bias_dtype", params->bias_dtype, ATTEND_FLOAT16, ATTEND_FLOAT32));
  }
  p->dtype = static_cast<DType>(params->dtype);
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
  return a;
}

// Memory is the caller's here, so no limit but the caller's own refuses a kernel.
Result<Selection> SelectFor(const attend_params& params, const Problem& p) {
  DeviceInfo device;
  device.kind = DeviceKind::kCuda;
  device.index = params.device;
  device.name = "cuda:" + std::to_string(params.device);
  device.workspace_bytes_max = INT64_MAX;
  cudaError_t error = cudaSuccess;
  int major = 0, minor = 0;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, params.device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, params.device);
  }
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Internal(cuda::ErrorText(error, "reading device " + device.name));
  }
  device.compute_capability = major * 10 + minor;
  return Select(p, device, params.kernel == nullptr ? "" : params.kernel);
}

Status Run(const attend_params* params, void* stream) {
  Problem p;
  ATTEND_RETURN_IF_ERROR(ReadProblem(params, &p));
  ATTEND_RETURN_IF_ERROR(CheckMemory(*params, p));
  const Result<Selection> selection = SelectFor(*params, p);
  if (!selection.ok()) return selection.status();
  if (params->workspace_bytes < selection->workspace_bytes ||
      (params->workspace == nullptr && selection->workspace_bytes > 0)) {
    return InvalidArgument("workspace_bytes is " + std::to_string(params->workspace_bytes) +
                           (params->workspace == nullptr ? " at NULL" : "") +
                           ", must be at least " + std::to_string(selection->workspace_bytes));
  }
  const DeviceScope scope(params->device);
  cudaError_t error = scope.error();
  if (error == cudaSuccess) {
    error = cuda::Launch(selection->kernel, ReadAttention(*params, p), params->workspace,
                         params->config, static_cast<cudaStream_t>(stream));
  }
  if (error == cudaSuccess) return Status();
  (void)cudaGetLastError();
  return Internal(cuda::ErrorText(error, std::string(KernelName(selection->kernel)) + " config " +
                                             std::to_string(params->config)));
}

Result<std::span<const cuda::FlashVariant>> VariantsFor(const attend_params* params) {
  Problem p;
  ATTEND_RETURN_IF_ERROR(ReadProblem(params, &p));
  const Result<Selection> selection = SelectFor(*params, p);
  if (!selection.ok()) return selection.status();
  if (selection->kernel == KernelId::kCudaFlashFp32) return cuda::FlashVariantsFor(p);
  static constexpr cuda::FlashVariant kOnly{"rows64_keys64_threads256", 64, 256, 0, nullptr};
  return std::span<const cuda::FlashVariant>(&kOnly, 1);
}

}  // namespace
}  // namespace attend

int32_t attend_run(const attend_params* params, void* stream) {
  return attend::Return(attend::Run(params, stream));
}

int32_t attend_workspace_bytes(const attend_params* params, int64_t* bytes) {
  attend::Problem p;
  attend::Status status = attend::ReadProblem(params, &p);
  if (status.ok() && bytes == nullptr) status = attend::InvalidArgument("bytes is NULL");
  if (!status.ok()) return attend::Return(status);
  const attend::Result<attend::Selection> selection = attend::SelectFor(*params, p);
  if (!selection.ok()) return attend::Return(selection.status());
  *bytes = selection->workspace_bytes;
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
  return (*variants)[config].name.data();  // names are literals, hence terminated
}

const char* attend_last_error(void) { return attend::last_error.c_str(); }

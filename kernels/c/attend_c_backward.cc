// SPDX-License-Identifier: Apache-2.0
//
// The backward functions of the C ABI. As in attend_c.cc, arguments are validated before the device
// is queried, and everything before anything is enqueued.

#include <array>
#include <string>
#include <string_view>

#include "kernels/c/attend_c.h"
#include "kernels/c/attend_c_params.h"
#include "kernels/c/attend_c_status.h"
#include "kernels/c/device.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"

namespace attend::c {
namespace {

TensorView View(const attend_tensor& t) { return {t.data, t.stride_b, t.stride_h, t.stride_l}; }

Gradients ReadGradients(const attend_backward_params& params) {
  Gradients g;
  g.d_o = {params.d_o.data, params.d_o.stride_b, params.d_o.stride_h, params.d_o.stride_l};
  g.d_lse = params.d_lse;
  g.d_q = View(params.d_q);
  g.d_k = View(params.d_k);
  g.d_v = View(params.d_v);
  g.d_bias = {params.d_bias, params.d_bias_stride_b, params.d_bias_stride_h,
              params.d_bias_stride_q};
  g.d_sinks = params.d_sinks;
  return g;
}

struct Pass {
  const Device* device = nullptr;
  BackwardItem item;
  Selection selection;
};

Status ReadItem(const attend_backward_params& params, BackwardItem* item) {
  const attend_params& attention = params.attention;
  Problem p;
  ATTEND_RETURN_IF_ERROR(ReadProblem(&attention, &p));
  if (p.packed) {
    ATTEND_RETURN_IF_ERROR(CheckPackedStrides({{"d_o.stride_b", params.d_o.stride_b},
                                               {"d_q.stride_b", params.d_q.stride_b},
                                               {"d_k.stride_b", params.d_k.stride_b},
                                               {"d_v.stride_b", params.d_v.stride_b}}));
  }
  // An LSE without elements may be NULL.
  p.return_lse = p.return_lse || ElementsLse(p) == 0;
  ATTEND_RETURN_IF_ERROR(CheckRange("config", attention.config, -1, -1));
  item->forward.attention = ReadAttention(attention, p);
  item->gradients = ReadGradients(params);
  return Check(item->forward.attention, item->gradients);
}

// Validates all arguments but memory, then queries the device.
Result<Pass> ReadPass(const attend_backward_params* params) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  ATTEND_RETURN_IF_ERROR(
      CheckStructBytes("attend_backward_params", params->struct_bytes, sizeof(*params)));
  Pass pass;
  ATTEND_RETURN_IF_ERROR(ReadItem(*params, &pass.item));
  const int32_t index = params->attention.device;
  const Result<const Device*> device = DeviceOf(index);
  if (!device.ok()) return device.status();
  pass.device = *device;
  const Result<DeviceInfo> info = pass.device->Info(index);
  if (!info.ok()) return info.status();
  const char* const kernel = params->attention.kernel;
  const Result<Selection> selection = SelectBackward(
      pass.item.forward.attention.problem, *info, kernel == nullptr ? std::string_view() : kernel,
      pass.device->Traits(pass.item));
  if (!selection.ok()) return selection.status();
  pass.selection = *selection;
  pass.item.forward.kernel = selection->kernel;
  return pass;
}

Status CheckGradientMemory(const attend_backward_params& params, const Problem& p) {
  ATTEND_RETURN_IF_ERROR(CheckMemory(params.attention, p));
  const int64_t batch = p.packed ? 1 : p.batch;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const struct {
    const char* name;
    const attend_tensor& tensor;
    int64_t heads, rows, columns;
  } gradients[] = {{"d_q", params.d_q, p.heads_q, rows_q, p.dim},
                   {"d_k", params.d_k, p.heads_kv, rows_k, p.dim},
                   {"d_v", params.d_v, p.heads_kv, rows_k, p.dim_v}};
  for (const auto& g : gradients) {
    if (g.tensor.data == nullptr) continue;
    const std::array<Dimension, 3> outer = {
        {{batch, g.tensor.stride_b}, {g.heads, g.tensor.stride_h}, {g.rows, g.tensor.stride_l}}};
    ATTEND_RETURN_IF_ERROR(CheckDistinct(g.name, outer, g.columns));
  }
  if (params.d_o.data != nullptr || ElementsO(p) == 0) return Status();
  return InvalidArgument("d_o is NULL, but has " + std::to_string(ElementsO(p)) + " elements");
}

Status RunBackward(const attend_backward_params* params, void* stream) {
  const Result<Pass> pass = ReadPass(params);
  if (!pass.ok()) return pass.status();
  const attend_params& attention = params->attention;
  ATTEND_RETURN_IF_ERROR(CheckGradientMemory(*params, pass->item.forward.attention.problem));
  const Result<int64_t> needed = pass->device->WorkspaceBytes(pass->item);
  if (!needed.ok()) return needed.status();
  ATTEND_RETURN_IF_ERROR(CheckWorkspace(attention.workspace, attention.workspace_bytes, *needed));
  return pass->device->Run(attention.device, pass->item, attention.workspace,
                           attention.workspace_bytes, stream);
}

Status WorkspaceBytes(const attend_backward_params* params, int64_t* bytes) {
  if (bytes == nullptr) return InvalidArgument("bytes is NULL");
  const Result<Pass> pass = ReadPass(params);
  if (!pass.ok()) return pass.status();
  const Result<int64_t> needed = pass->device->WorkspaceBytes(pass->item);
  if (!needed.ok()) return needed.status();
  *bytes = *needed;
  return Status();
}

Status SelectBackward(const attend_backward_params* params, const char** kernel, const char** why) {
  const Result<Pass> pass = ReadPass(params);
  if (!pass.ok()) return pass.status();
  // Both are static, NUL-terminated strings.
  if (kernel != nullptr) *kernel = KernelName(pass->selection.kernel).data();
  if (why != nullptr) *why = pass->selection.why.data();
  return Status();
}

}  // namespace
}  // namespace attend::c

int32_t attend_run_backward(const attend_backward_params* params, void* stream) {
  return attend::Run([&] { return attend::c::RunBackward(params, stream); });
}

int32_t attend_backward_workspace_bytes(const attend_backward_params* params, int64_t* bytes) {
  return attend::Run([&] { return attend::c::WorkspaceBytes(params, bytes); });
}

int32_t attend_select_backward(const attend_backward_params* params, const char** kernel,
                               const char** why) {
  return attend::Run([&] { return attend::c::SelectBackward(params, kernel, why); });
}

// SPDX-License-Identifier: Apache-2.0
//
// The forward functions of the C ABI: kernel selection, workspace size, execution. Arguments are
// validated before the device is queried, and everything before anything is enqueued.

#include "kernels/c/attend_c.h"

#include <string>
#include <string_view>
#include <vector>

#include "kernels/c/attend_c_params.h"
#include "kernels/c/attend_c_status.h"
#include "kernels/c/device.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/select.h"

namespace attend::c {
namespace {

std::string_view Kernel(const attend_params& params) {
  return params.kernel == nullptr ? std::string_view() : params.kernel;
}

Result<Selection> SelectFor(const attend_params& params, const Problem& p, const Device& device,
                            const DeviceInfo& info) {
  return Select(p, info, Kernel(params), device.Traits(ReadAttention(params, p)));
}

// Attentions for one device, validated.
struct Batch {
  const Device* device = nullptr;
  std::vector<Item> items;
};

enum class Memory { kIgnored, kChecked };

Status ReadParams(const attend_params* params, int32_t count, Memory memory, Batch* batch) {
  const auto size = static_cast<size_t>(count);
  for (size_t n = 0; n < size; ++n) {
    Problem p;
    ATTEND_RETURN_IF_ERROR(At(n, size, ReadProblem(&params[n], &p)));
    if (params[n].device != params[0].device) {
      return InvalidArgument("params[" + std::to_string(n) + "].device is " +
                             std::to_string(params[n].device) + ", must be params[0].device, " +
                             std::to_string(params[0].device));
    }
    if (memory == Memory::kChecked) {
      ATTEND_RETURN_IF_ERROR(At(n, size, CheckMemory(params[n], p)));
      ATTEND_RETURN_IF_ERROR(At(n, size, CheckOutputs(params[n], p)));
    }
    batch->items.push_back({.attention = ReadAttention(params[n], p), .config = params[n].config});
  }
  return Status();
}

// A batch without params has no device.
Result<Batch> ReadBatch(const attend_params* params, int32_t count, Memory memory) {
  ATTEND_RETURN_IF_ERROR(CheckRange("count", count, 0, INT32_MAX));
  if (count > 0 && params == nullptr) return InvalidArgument("params is NULL");
  Batch batch;  // grows as params are read: `count` is not trusted for an allocation
  if (count == 0) return batch;
  ATTEND_RETURN_IF_ERROR(ReadParams(params, count, memory, &batch));
  const Result<const Device*> device = DeviceOf(params[0].device);
  if (!device.ok()) return device.status();
  batch.device = *device;
  const Result<DeviceInfo> info = batch.device->Info(params[0].device);
  if (!info.ok()) return info.status();
  for (size_t n = 0; n < batch.items.size(); ++n) {
    const Problem& p = batch.items[n].attention.problem;
    const Result<Selection> selection = SelectFor(params[n], p, *batch.device, *info);
    if (!selection.ok()) return At(n, batch.items.size(), selection.status());
    batch.items[n].kernel = selection->kernel;
  }
  return batch;
}

Status RunBatch(const attend_params* params, int32_t count, void* workspace,
                int64_t workspace_bytes, void* stream) {
  const Result<Batch> batch = ReadBatch(params, count, Memory::kChecked);
  if (!batch.ok()) return batch.status();
  if (batch->items.empty()) return Status();
  const Result<int64_t> needed = batch->device->WorkspaceBytes(batch->items);
  if (!needed.ok()) return needed.status();
  ATTEND_RETURN_IF_ERROR(CheckWorkspace(workspace, workspace_bytes, *needed));
  return batch->device->Run(params[0].device, batch->items, workspace, workspace_bytes, stream);
}

Status RunOne(const attend_params* params, void* stream) {
  if (params == nullptr) return InvalidArgument("params is NULL");
  // Check the size first: fields at the end may not exist.
  ATTEND_RETURN_IF_ERROR(CheckStructBytes("attend_params", params->struct_bytes, sizeof(*params)));
  return RunBatch(params, 1, params->workspace, params->workspace_bytes, stream);
}

Status WorkspaceBytes(const attend_params* params, int32_t count, int64_t* bytes) {
  if (bytes == nullptr) return InvalidArgument("bytes is NULL");
  const Result<Batch> batch = ReadBatch(params, count, Memory::kIgnored);
  if (!batch.ok()) return batch.status();
  if (batch->items.empty()) {
    *bytes = 0;
    return Status();
  }
  const Result<int64_t> needed = batch->device->WorkspaceBytes(batch->items);
  if (!needed.ok()) return needed.status();
  *bytes = *needed;
  return Status();
}

// One attention and the kernel selected for it.
struct Chosen {
  const Device* device = nullptr;
  Problem problem;
  Selection selection;
};

Result<Chosen> Choose(const attend_params* params) {
  Chosen chosen;
  ATTEND_RETURN_IF_ERROR(ReadProblem(params, &chosen.problem));
  const Result<const Device*> device = DeviceOf(params->device);
  if (!device.ok()) return device.status();
  chosen.device = *device;
  const Result<DeviceInfo> info = chosen.device->Info(params->device);
  if (!info.ok()) return info.status();
  const Result<Selection> selection = SelectFor(*params, chosen.problem, *chosen.device, *info);
  if (!selection.ok()) return selection.status();
  chosen.selection = *selection;
  return chosen;
}

Result<std::vector<std::string_view>> VariantsFor(const attend_params* params) {
  const Result<Chosen> chosen = Choose(params);
  if (!chosen.ok()) return chosen.status();
  return chosen->device->Variants(chosen->selection.kernel, chosen->problem);
}

Status SelectOne(const attend_params* params, const char** kernel, const char** why) {
  const Result<Chosen> chosen = Choose(params);
  if (!chosen.ok()) return chosen.status();
  // Both are static, NUL-terminated strings.
  if (kernel != nullptr) *kernel = KernelName(chosen->selection.kernel).data();
  if (why != nullptr) *why = chosen->selection.why.data();
  return Status();
}

Status CountVariants(const attend_params* params, int32_t* count) {
  const auto variants = VariantsFor(params);
  if (!variants.ok()) return variants.status();
  if (count == nullptr) return InvalidArgument("count is NULL");
  *count = static_cast<int32_t>(variants->size());
  return Status();
}

// Leaves `name` as it is if there is no such variant.
Status NameVariant(const attend_params* params, int32_t config, const char** name) {
  const auto variants = VariantsFor(params);
  if (!variants.ok()) return variants.status();
  if (config < 0 || config >= static_cast<int32_t>(variants->size())) return Status();
  *name = (*variants)[static_cast<size_t>(config)].data();  // a static, NUL-terminated string
  return Status();
}

}  // namespace
}  // namespace attend::c

int32_t attend_run(const attend_params* params, void* stream) {
  return attend::Run([&] { return attend::c::RunOne(params, stream); });
}

int32_t attend_run_batch(const attend_params* params, int32_t count, void* workspace,
                         int64_t workspace_bytes, void* stream) {
  return attend::Run(
      [&] { return attend::c::RunBatch(params, count, workspace, workspace_bytes, stream); });
}

int32_t attend_workspace_bytes(const attend_params* params, int64_t* bytes) {
  return attend::Run([&] { return attend::c::WorkspaceBytes(params, 1, bytes); });
}

int32_t attend_batch_workspace_bytes(const attend_params* params, int32_t count, int64_t* bytes) {
  return attend::Run([&] { return attend::c::WorkspaceBytes(params, count, bytes); });
}

int32_t attend_select(const attend_params* params, const char** kernel, const char** why) {
  return attend::Run([&] { return attend::c::SelectOne(params, kernel, why); });
}

int32_t attend_configs(const attend_params* params, int32_t* count) {
  return attend::Run([&] { return attend::c::CountVariants(params, count); });
}

const char* attend_config_name(const attend_params* params, int32_t config) {
  const char* name = "";
  (void)attend::Run([&] { return attend::c::NameVariant(params, config, &name); });
  return name;
}

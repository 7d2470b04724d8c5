// SPDX-License-Identifier: Apache-2.0

#include "kernels/c/device.h"

#include "kernels/c/attend_c.h"

namespace attend::c {

Result<const Device*> DeviceOf(int32_t index) {
  if (index == ATTEND_CPU) return &CpuDevice();
  if (index >= 0) return &CudaDevice();
  return InvalidArgument("device is " + std::to_string(index) +
                         ", must be an ordinal of at least 0 or ATTEND_CPU, " +
                         std::to_string(ATTEND_CPU));
}

Status At(size_t index, size_t count, const Status& status) {
  if (status.ok() || count == 1) return status;
  return Status(status.code(), "params[" + std::to_string(index) + "]: " + status.message());
}

}  // namespace attend::c

// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/runtime/cuda_status.h"

namespace attend::cuda {

std::string ErrorText(cudaError_t error, const std::string& where) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ") in " + where;
}

Status ToStatus(cudaError_t error, const std::string& where) {
  if (error == cudaSuccess) return Status();
  if (error == cudaErrorMemoryAllocation) return ResourceExhausted(ErrorText(error, where));
  return Internal(ErrorText(error, where));
}

bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDevicesUnavailable:
    case cudaErrorDeviceUninitialized:
    case cudaErrorExternalDevice:
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace attend::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The CUDA functions of a build without CUDA: they refuse every GPU.

#include "kernels/contract/backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace attend {

int CudaDeviceCount(std::string* why) {
  if (why != nullptr) *why = "this build has no CUDA kernels";
  return 0;
}

std::string CudaBuildVersion() { return "none"; }

Result<std::unique_ptr<Backend>> MakeCudaBackend(int index, const BackendOptions&) {
  return Status(Code::kNotFound,
                "device cuda:" + std::to_string(index) + ": this build has no CUDA kernels");
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Creates backends by device name. Knows cpu/ and cuda/, which do not know each other.

#include <charconv>
#include <memory>
#include <string>

#include "kernels/contract/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace attend {

Result<std::unique_ptr<Backend>> MakeBackend(const std::string& name,
                                             const BackendOptions& options) {
  if (name == "cpu") return MakeCpuBackend(options);
  constexpr std::string_view kPrefix = "cuda:";
  int index = -1;
  if (name.starts_with(kPrefix)) {
    const char* first = name.data() + kPrefix.size();
    const char* last = name.data() + name.size();
    const auto [end, error] = std::from_chars(first, last, index);
    if (error != std::errc() || end != last) index = -1;
  }
  if (index < 0) {
    return InvalidArgument("device is \"" + name + "\", must be \"cpu\" or \"cuda:N\", N >= 0");
  }
  return MakeCudaBackend(index, options);
}

}  // namespace attend

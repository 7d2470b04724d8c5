// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a response: O and LSE, or the gradients of a backward pass.

#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"

namespace attend {

// In the order of their entries in `raw`.
enum class Output { kO, kLse, kDQ, kDK, kDV, kDBias, kDSinks };
inline constexpr int kOutputsMax = 7;
inline constexpr std::array<const char*, kOutputsMax> kOutputNames = {
    "o", "lse", "d_q", "d_k", "d_v", "d_bias", "d_sinks"};

// Size of the tensor, which is dense, like every output of the server.
int64_t OutputBytes(const Attention& attention, Output output);

// The additional parameters of a request for gradients.
struct BackwardPass {
  Gradients gradients;
  std::array<bool, kOutputsMax> wanted{};  // by Output; a null pointer cannot say this, as an empty
                                           // gradient may have no address
  std::array<int64_t, 4> bias_shape{};     // of bias and its gradient
};

struct OutputTensor {
  bool wanted = false;  // the response contains it
  const void* data = nullptr;
  int64_t bytes = 0;
};
// The outputs of `attention`, or of its backward pass if there is one, indexed by Output.
// `lse_for_check`: LSE is computed for the reference check only and is not part of the response.
std::array<OutputTensor, kOutputsMax> OutputsOf(const Attention& attention,
                                                const std::optional<BackwardPass>& backward,
                                                bool lse_for_check);

}  // namespace attend

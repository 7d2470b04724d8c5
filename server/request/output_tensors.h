// SPDX-License-Identifier: Apache-2.0
//
// The tensors of an answer: O and LSE, or the gradients of a backward pass.

#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"

namespace attend {

// In the order of their raw entries.
enum class Output { kO, kLse, kDQ, kDK, kDV, kDBias, kDSinks };
inline constexpr int kOutputsMax = 7;
inline constexpr std::array<const char*, kOutputsMax> kOutputNames = {
    "o", "lse", "d_q", "d_k", "d_v", "d_bias", "d_sinks"};

// Bytes of the tensor, which is dense, as the server's are.
int64_t OutputBytes(const Attention& attention, Output output);

// What a request for gradients has beside its attention.
struct BackwardPass {
  Gradients gradients;
  std::array<bool, kOutputsMax> wanted{};  // by Output; an empty gradient may have no address
  std::array<int64_t, 4> bias_shape{};     // of bias and its gradient
};

struct OutputTensor {
  bool wanted = false;  // the answer has it
  const void* data = nullptr;
  int64_t bytes = 0;
};
// By Output: of `attention`, or of its backward pass if there is one. `lse_for_check`: LSE is there
// for the reference check alone.
std::array<OutputTensor, kOutputsMax> OutputsOf(const Attention& attention,
                                                const std::optional<BackwardPass>& backward,
                                                bool lse_for_check);

}  // namespace attend

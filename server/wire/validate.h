// SPDX-License-Identifier: Apache-2.0
//
// All rules of attention.proto that a request can break, except those about its raw bytes. Pure;
// any thread. A request that passes this, Check(Problem) and the codec's comparison of lengths is
// safe to run.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "attend/v1/attention.pb.h"
#include "kernels/contract/problem.h"
#include "kernels/contract/tree.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/wire/wire_arrays.h"

namespace attend {

inline constexpr int64_t kRequestIdBytesMax = 128;
inline constexpr int32_t kPriorityMax = 100;  // and its negative

// A request's small fields in the server's terms.
struct Validated {
  Layout layout = Layout::kBhld;
  // Problem and strides; no pointers.
  Attention attention;
  // The inputs that are present. With sessions, k and v may be absent: the request appends nothing.
  std::array<bool, kTensorsMax> present{};
  // Size of each in bytes; inline ones must have raw entries of these lengths, in this order.
  std::array<int64_t, kTensorsMax> tensor_bytes{};
  // In shared memory, without a raw entry; set by CheckSources.
  std::array<bool, kTensorsMax> shared{};
  // By Output: present in the answer, and written to shared memory (set by CheckSources).
  std::array<bool, kOutputsMax> wanted{};
  std::array<bool, kOutputsMax> output_shared{};
  // Set for a backward pass: the strides of dO and of the gradients.
  std::optional<Gradients> gradients;
  std::array<int64_t, 4> bias_shape{};  // for a backward pass with a bias
  TreeView tree;           // without pointers; tokens > 0: there is one, and the bias is its own
  int64_t tree_bytes = 0;  // of the bias that it is written out as

  void Want(Output output) { wanted[static_cast<size_t>(output)] = true; }
  bool wants(Output output) const { return wanted[static_cast<size_t>(output)]; }
  // Whether the bytes of the tensor arrive in the request's messages.
  bool in_message(int tensor) const { return present[tensor] && !shared[tensor]; }
  bool any_shared() const {
    const auto is_set = [](bool each) { return each; };
    return std::any_of(shared.begin(), shared.end(), is_set) ||
           std::any_of(output_shared.begin(), output_shared.end(), is_set);
  }
};

// The tensor named kInputNames[input].
inline const v1::Tensor& InputOf(const v1::AttendRequest& request, int input) {
  const v1::BackwardPass& backward = request.backward();
  const std::array inputs = {&request.q(),  &request.k(),    &request.v(),    &request.bias(),
                             &backward.o(), &backward.lse(), &backward.d_o(), &backward.d_lse()};
  return *inputs[input];
}

// The placement of an output.
inline const v1::Placement& PlacementOf(const v1::AttendRequest& request, Output output) {
  const v1::BackwardPass& backward = request.backward();
  const std::array outputs = {&request.o_placement(),       &request.lse_placement(),
                              &backward.d_q_placement(),    &backward.d_k_placement(),
                              &backward.d_v_placement(),    &backward.d_bias_placement(),
                              &backward.d_sinks_placement()};
  return *outputs[static_cast<size_t>(output)];
}

// Its field name: "o_placement", "backward.d_q_placement".
inline std::string PlacementName(Output output) {
  return std::string(output > Output::kLse ? "backward." : "") +
         kOutputNames[static_cast<size_t>(output)] + "_placement";
}

// INVALID_ARGUMENT names the field, the value and the bound; UNIMPLEMENTED names a tensor source or
// placement unknown to this server. `arrays` are the repeated numbers, which `request` itself does
// not contain. `cache` is the hold on the request's sessions, if it names any.
Status Validate(const v1::AttendRequest& request, const WireArrays& arrays, Validated& out,
                const CacheHold* cache = nullptr);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Every rule of attention.proto that a request can break, except those about its raw bytes. Pure;
// any thread. A request that passes this, Check(Problem) and the codec's length comparison is safe
// to run.

#pragma once

#include <array>
#include <cstdint>

#include "attend/v1/attention.pb.h"
#include "kernels/contract/problem.h"
#include "kernels/util/status.h"
#include "server/request/request.h"
#include "server/wire/wire_arrays.h"

namespace attend {

inline constexpr int64_t kRequestIdBytesMax = 128;
inline constexpr int32_t kPriorityMax = 100;  // and its negative

// The small fields in the server's terms.
struct Validated {
  Layout layout = Layout::kBhld;
  // Everything but the pointers: problem and strides.
  Attention attention;
  // Bytes of q, k, v and bias; the raw entries of inline ones must have these lengths, in this
  // order.
  std::array<int64_t, kTensorsMax> tensor_bytes{};
  int tensors = 3;  // 4 with a bias
  // Which tensors are in shared memory and have no raw entry; set by CheckSources.
  std::array<bool, kTensorsMax> shared{};
  // k and v that a request on sessions lacks: it appends nothing.
  bool no_keys = false;
  bool o_shared = false;
  bool lse_shared = false;

  // Whether the bytes of that tensor come in the request's messages.
  bool in_message(int tensor) const {
    return !shared[tensor] && !(no_keys && (tensor == 1 || tensor == 2));
  }
  bool any_shared() const {
    return shared[0] || shared[1] || shared[2] || shared[3] || o_shared || lse_shared;
  }
};

// The tensor with the name kInputNames[input].
inline const v1::Tensor& InputOf(const v1::AttendRequest& request, int input) {
  const std::array inputs = {&request.q(), &request.k(), &request.v(), &request.bias()};
  return *inputs[input];
}

// INVALID_ARGUMENT names the field, the value and the bound; UNIMPLEMENTED names a place for tensor
// bytes that this server does not know. `arrays` are the request's repeated numbers, which
// `request` itself does not contain. `cache`, if the request names sessions, holds them.
Status Validate(const v1::AttendRequest& request, const WireArrays& arrays, Validated& out,
                const CacheHold* cache = nullptr);

}  // namespace attend

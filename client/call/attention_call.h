// SPDX-License-Identifier: Apache-2.0
//
// One attention call and its answer. The fields are those of the messages in
// proto/attend/v1/attention.proto, which documents each field's meaning, default and bound. Plain
// values.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attend/v1/attention.pb.h"
#include "client/call/tensor.h"
#include "kernels/contract/problem.h"
#include "kernels/reference/check_rows.h"

namespace attend::client {

struct MaskOption {
  v1::Mask::Kind kind = v1::Mask::KIND_NONE;
  std::optional<int64_t> window_left;   // keys; -1 = no bound
  std::optional<int64_t> window_right;  // keys; -1 = no bound
};

// Where the server writes the answer's tensors; those without a place come in the answer. The
// contents are an answer only once the call has succeeded. The server may still write there after a
// call was cancelled, timed out or lost its connection: only a new region is safe then.
struct SharedOutputs {
  std::optional<SharedPlace> o;
  std::optional<SharedPlace> lse;  // with return_lse
};

// The KV cache that one sequence of a call reads, as SessionUse in attention.proto. session.h fills
// it in.
struct SessionUse {
  std::string session;  // its id
  int32_t layer = 0;
  int64_t length = 0;     // tokens that the layer has
  std::string append_id;  // names the append; at most 32 bytes
};

struct AttentionCall {
  std::string request_id;  // empty: the client makes one
  TensorRef q, k, v;
  std::optional<TensorRef> bias;
  v1::Layout layout = v1::LAYOUT_BHLD;
  std::vector<int64_t> q_lengths, kv_lengths;  // dense layouts
  std::vector<int64_t> cu_q, cu_kv;            // packed layout
  std::optional<float> scale;
  MaskOption mask;
  float softcap = 0;
  std::vector<float> alibi_slopes;
  std::vector<float> sinks;
  bool return_lse = false;
  bool o_float32 = false;  // O is float32 whatever q's dtype is: partial answers, to be merged
  std::string kernel;
  bool check = false;
  int32_t priority = 0;
  SharedOutputs outputs;
  // One for each sequence: K and V are in sessions. k and v are then the rows to be appended,
  // [B, Hkv, n, D] and [B, Hkv, n, Dv] in the layout (not LHD), or neither has a shape.
  std::vector<SessionUse> sessions;
};

// Nanoseconds of the server's steady clock.
struct PhaseTimings {
  int64_t receive_ns = 0;
  int64_t queue_ns = 0;
  int64_t copy_in_ns = 0;
  int64_t kernel_ns = 0;
  int64_t copy_out_ns = 0;
  int64_t check_ns = 0;
  int64_t total_ns = 0;
};

struct AttentionResult {
  std::string request_id;
  HostTensor o;  // in the call's place for O, if it named one; the next call there overwrites it
  std::optional<HostTensor> lse;
  PhaseTimings timings;
  int64_t batch_requests = 0;
  std::string kernel;
  std::string kernel_reason;
  std::string device;
  std::string transport;
  std::optional<RowsReport> check;       // the server's own reference check, without LSE's errors
  std::vector<int64_t> session_lengths;  // of each sequence's layer, the new rows included
  bool sessions_ending = false;          // the server is draining: they end with it, soon
};

// Describes the call to the kernels, with outputs `o` and `lse`, which may be null if only the
// description matters. For the client's own verification and for counting operations. Refers to the
// call's memory and vectors. INVALID_ARGUMENT names what does not fit together, and
// refuses calls on sessions, whose K and V are not here.
Result<Attention> Describe(const AttentionCall& call, const HostTensor* o, const HostTensor* lse);

// Whether the call has k and v; if not, it reads what is in its sessions.
inline bool HasKeys(const AttentionCall& call) {
  return call.sessions.empty() || !call.k.shape.empty() || !call.v.shape.empty();
}
inline DType AnswerDType(const AttentionCall& call) {
  return call.o_float32 ? DType::kFloat32 : call.q.dtype;
}
// Tensor bytes that the call sends or names.
int64_t PayloadBytes(const AttentionCall& call);
// Shapes of the answer's tensors; meaningless unless the call's own tensors fit together. O's is
// not known without v.
std::vector<int64_t> AnswerShape(const AttentionCall& call);
std::vector<int64_t> LseShape(const AttentionCall& call);
// Bytes of O in the answer, if the shapes fit together.
int64_t AnswerBytes(const AttentionCall& call);

}  // namespace attend::client

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
  // k and v are a part of the keys, whose answer MergePartial merges with the others': so many are
  // before the part's, and so many after it. Mask, ALiBi and dropout count keys as the whole does.
  int64_t key_offset = 0;
  int64_t keys_after = 0;
};

// Where the server writes the answer's tensors; those without a place come in the answer. The
// contents are an answer only once the call has succeeded. The server may still write there after a
// call was cancelled, timed out or lost its connection: only a new region is safe then.
struct SharedOutputs {
  std::optional<SharedPlace> o;
  std::optional<SharedPlace> lse;                             // with return_lse
  std::optional<SharedPlace> d_q, d_k, d_v, d_bias, d_sinks;  // of a backward pass

  bool any() const { return o || lse || d_q || d_k || d_v || d_bias || d_sinks; }
};

// The KV cache that one sequence of a call reads, as SessionUse in attention.proto. session.h fills
// it in.
struct SessionUse {
  std::string session;  // its id
  int32_t layer = 0;
  int64_t length = 0;     // tokens that the layer has
  std::string append_id;  // names the append; at most 32 bytes
};

// What makes a call one for gradients, as BackwardPass in attention.proto: O and LSE of the same
// attention, the loss's gradients by them, and what is wanted.
struct BackwardCall {
  TensorRef o, lse, d_o;
  std::optional<TensorRef> d_lse;  // none: 0
  bool d_q = true, d_k = true, d_v = true, d_bias = false, d_sinks = false;
};

struct AttentionCall {
  std::string request_id;  // empty: the client makes one
  TensorRef q, k, v;
  std::optional<TensorRef> bias;  // of numbers, or DType::kBit: a mask
  v1::Layout layout = v1::LAYOUT_BHLD;
  std::vector<int64_t> q_lengths, kv_lengths;  // dense layouts
  std::vector<int64_t> cu_q, cu_kv;            // packed layout
  std::optional<float> scale;
  MaskOption mask;
  float softcap = 0;
  std::vector<float> alibi_slopes;
  std::vector<float> sinks;
  float dropout_p = 0;        // rounded to a multiple of 2^-16
  uint64_t dropout_seed = 0;  // which weights are dropped
  bool return_lse = false;
  bool o_float32 = false;  // O is float32 whatever q's dtype is: partial answers, to be merged
  std::string kernel;
  bool check = false;
  int32_t priority = 0;
  SharedOutputs outputs;
  // One for each sequence: K and V are in sessions. k and v are then the rows to be appended,
  // [B, Hkv, n, D] and [B, Hkv, n, Dv] in the layout (not LHD), or neither has a shape.
  std::vector<SessionUse> sessions;
  // Set: the call asks for gradients instead of O and LSE. Not with return_lse or sessions.
  std::optional<BackwardCall> backward;
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

// Those that were asked for.
struct GradientTensors {
  std::optional<HostTensor> d_q, d_k, d_v, d_bias, d_sinks;
};

// Tensors are in the call's place for them, if it named one; the next call there overwrites them.
struct AttentionResult {
  std::string request_id;
  HostTensor o;  // empty after a backward pass
  std::optional<HostTensor> lse;
  std::optional<GradientTensors> gradients;  // of a backward pass
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

// The mask as kernels know it.
attend::Mask MaskOf(const MaskOption& option);

// Whether the call has k and v; if not, it reads what is in its sessions.
inline bool HasKeys(const AttentionCall& call) {
  return call.sessions.empty() || !call.k.shape.empty() || !call.v.shape.empty();
}
inline DType AnswerDType(const AttentionCall& call) {
  return call.o_float32 ? DType::kFloat32 : call.q.dtype;
}
// The call's tensors in the order of their raw entries, with their names there. Of `call`'s type,
// const or not.
template <class Call, class Visit>
void ForTensors(Call& call, const Visit& visit) {
  visit(v1::TENSOR_NAME_Q, call.q);
  if (HasKeys(call)) {
    visit(v1::TENSOR_NAME_K, call.k);
    visit(v1::TENSOR_NAME_V, call.v);
  }
  if (call.bias) visit(v1::TENSOR_NAME_BIAS, *call.bias);
  if (!call.backward) return;
  visit(v1::TENSOR_NAME_O, call.backward->o);
  visit(v1::TENSOR_NAME_LSE, call.backward->lse);
  visit(v1::TENSOR_NAME_D_O, call.backward->d_o);
  if (call.backward->d_lse) visit(v1::TENSOR_NAME_D_LSE, *call.backward->d_lse);
}
// Tensor bytes that the call sends or names.
int64_t PayloadBytes(const AttentionCall& call);
// Shapes of the answer's tensors; meaningless unless the call's own tensors fit together. O's is
// not known without v.
std::vector<int64_t> AnswerShape(const AttentionCall& call);
std::vector<int64_t> LseShape(const AttentionCall& call);
// The tensors of the answer in the order of their raw entries, LSE or gradients included. Without v
// O is not among them.
struct AnswerTensor {
  v1::TensorName name = v1::TENSOR_NAME_UNSPECIFIED;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
};
std::vector<AnswerTensor> AnswerTensors(const AttentionCall& call);
inline constexpr int kAnswerTensorsMax = 7;
// "o", "d_q".
const char* NameOf(v1::TensorName name);
// The result's tensor of that name, made if it is not there. One of those that answers have.
HostTensor& MakeTensorOf(AttentionResult& result, v1::TensorName name);
// Null if it is not there.
const HostTensor* TensorOf(const AttentionResult& result, v1::TensorName name);
// Its place in shared memory, if it has one. Of `outputs`' type, const or not.
template <class Outputs>
auto& PlaceOf(Outputs& outputs, v1::TensorName name) {
  switch (name) {
    case v1::TENSOR_NAME_LSE:
      return outputs.lse;
    case v1::TENSOR_NAME_D_Q:
      return outputs.d_q;
    case v1::TENSOR_NAME_D_K:
      return outputs.d_k;
    case v1::TENSOR_NAME_D_V:
      return outputs.d_v;
    case v1::TENSOR_NAME_D_BIAS:
      return outputs.d_bias;
    case v1::TENSOR_NAME_D_SINKS:
      return outputs.d_sinks;
    default:
      return outputs.o;
  }
}
// Bytes of O in the answer, or of the gradients, if the shapes fit together.
int64_t AnswerBytes(const AttentionCall& call);

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// One attention call and its answer. The fields correspond to the messages in
// proto/attend/v1/attention.proto, which documents meaning, default and bound of each. Plain
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
  // For attention over a part of the keys, merged by MergePartial: key_offset keys precede the
  // part's and keys_after follow them. Mask, ALiBi and dropout use key positions in the whole.
  int64_t key_offset = 0;
  int64_t keys_after = 0;
};

// Where the server writes the answer's tensors; those without a place come inline. The contents are
// valid only once the call has succeeded. After a call was cancelled, timed out or lost its
// connection, the server may still write there: use a new region then.
struct SharedOutputs {
  std::optional<SharedPlace> o;
  std::optional<SharedPlace> lse;                             // with return_lse
  std::optional<SharedPlace> d_q, d_k, d_v, d_bias, d_sinks;  // of a backward pass

  bool any() const { return o || lse || d_q || d_k || d_v || d_bias || d_sinks; }
};

// The KV cache that one sequence of a call reads (SessionUse in attention.proto). Filled in by
// Session.
struct SessionUse {
  std::string session;  // its id
  int32_t layer = 0;
  int64_t length = 0;     // the layer's tokens
  std::string append_id;  // id of the append; at most 32 bytes
};

// The backward part of a call (BackwardPass in attention.proto): O and LSE of the same attention,
// the loss's gradients with respect to them, and which gradients to compute.
struct BackwardCall {
  TensorRef o, lse, d_o;
  std::optional<TensorRef> d_lse;  // unset: 0
  bool d_q = true, d_k = true, d_v = true, d_bias = false, d_sinks = false;
};

struct AttentionCall {
  std::string request_id;  // empty: generated
  TensorRef q, k, v;
  std::optional<TensorRef> bias;  // numeric, or DType::kBit: a mask
  // The mask of a draft whose tokens are a tree, [B or 1, T, T] of DType::kBit in host memory
  // (tree_mask.h); not with a bias. Sent with the small fields.
  std::optional<TensorRef> tree;
  std::vector<int64_t> tree_lengths;  // tokens of each sequence's draft; empty: T
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
  bool o_float32 = false;  // O is float32 for any dtype of q: partial answers, to be merged
  std::string kernel;
  bool check = false;
  int32_t priority = 0;
  SharedOutputs outputs;
  // One per sequence if K and V are in sessions. k and v are then the rows to append, [B, Hkv, n,
  // D] and [B, Hkv, n, Dv] in the layout (not LHD), or both without a shape.
  std::vector<SessionUse> sessions;
  // Set: compute gradients instead of O and LSE. Not with return_lse or sessions.
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

// The requested ones are set.
struct GradientTensors {
  std::optional<HostTensor> d_q, d_k, d_v, d_bias, d_sinks;
};

// Tensors are in the places that the call named, if any; the next call with those places overwrites
// them.
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
  std::optional<RowsReport> check;       // the server's reference check, without LSE's errors
  std::vector<int64_t> session_lengths;  // length of each sequence's layer, the new rows included
  bool sessions_ending = false;  // the server is draining: the sessions will end with it soon
};

// The call as the kernels' Attention, with outputs `o` and `lse`, which may be null if only the
// description matters. For verification in the client and for counting FLOPs. Refers to the call's
// tensors and vectors. INVALID_ARGUMENT: shapes or fields do not fit together, or the call uses
// sessions, whose K and V are on the server.
Result<Attention> Describe(const AttentionCall& call, const HostTensor* o, const HostTensor* lse);

// The mask in the kernels' form.
attend::Mask MaskOf(const MaskOption& option);

// Whether the call has k and v; a call without them only reads its sessions.
inline bool HasKeys(const AttentionCall& call) {
  return call.sessions.empty() || !call.k.shape.empty() || !call.v.shape.empty();
}
inline DType AnswerDType(const AttentionCall& call) {
  return call.o_float32 ? DType::kFloat32 : call.q.dtype;
}
// Visits the call's tensors, with their names, in the order of their `raw` entries. Const if `call`
// is.
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
// Tensor bytes that the call sends or refers to.
int64_t PayloadBytes(const AttentionCall& call);
// Shapes of the answer's tensors; meaningless unless the call's tensors fit together. O's is
// unknown without v.
std::vector<int64_t> AnswerShape(const AttentionCall& call);
std::vector<int64_t> LseShape(const AttentionCall& call);
// The answer's tensors, LSE or gradients included, in the order of their `raw` entries. Without k
// and v, O is not among them.
struct AnswerTensor {
  v1::TensorName name = v1::TENSOR_NAME_UNSPECIFIED;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
};
std::vector<AnswerTensor> AnswerTensors(const AttentionCall& call);
inline constexpr int kAnswerTensorsMax = 7;
// "o", "d_q".
const char* NameOf(v1::TensorName name);
// The result's tensor of that name, created if missing. `name` must be one that answers have.
HostTensor& MakeTensorOf(AttentionResult& result, v1::TensorName name);
// Null if the result has no such tensor.
const HostTensor* TensorOf(const AttentionResult& result, v1::TensorName name);
// The tensor's place in shared memory, if any. Const if `outputs` is.
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
// Bytes of O in the answer, or of the gradients; 0 if the shapes do not fit together.
int64_t AnswerBytes(const AttentionCall& call);

}  // namespace attend::client

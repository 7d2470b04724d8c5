// SPDX-License-Identifier: Apache-2.0
//
// The backward pass of one attention: from the loss's gradients with respect to O and LSE to those
// with respect to Q, K, V and, on request, bias and sinks.
//
// With P the weights, which sum to 1 in every row (its sink included), dP = dO V^T, and delta_i =
// sum_j P_ij dP_ij, which equals dO_i . O_i up to O's rounding:
//
//   dS_ij = P_ij (dP_ij - delta_i + dLSE_i)            w.r.t. the score that mask and softmax see
//   dT_ij = dS_ij (1 - Share(capped_ij)^2)             w.r.t. scale * q.k; Share of CapOf
//   dQ_i = scale sum_j dT_ij K_j       dK_j = scale sum_i dT_ij Q_i       dV_j = sum_i P_ij dO_i
//   dBias_ij = dS_ij                   dSink_h = -sum_i exp(sink_h - LSE_i) (delta_i - dLSE_i)
//
// summed over a group's query heads in dK and dV, and in dBias over the dimensions that bias
// broadcasts. (Dao et al. 2022, appendix B.)
//
// If the keys are a part of a whole, O and LSE are the whole's (merged, softmax_state.h) and stand
// for the missing keys: P is exp(score - LSE) and delta is dO . O, in every kernel, and a row's
// weights sum to the part's share of 1.

#pragma once

#include <cstdint>

#include "kernels/contract/problem.h"
#include "kernels/util/status.h"

namespace attend {

// Inputs and outputs of the backward pass beside the Attention, whose O and LSE are its result.
// Memory is as in Attention. Non-owning. A gradient that is not wanted has null data. A pass writes
// every row of the gradients it computes: 0 for rows beyond a dense sequence's length, rows that
// see no key, keys that no row sees, and a bias that is broadcast to nothing. Only dBias may have
// strides of 0: any other gradient would be written more than once.
struct Gradients {
  ConstTensorView d_o;           // as O, in its dtype
  const float* d_lse = nullptr;  // as LSE, with its strides; null: 0
  TensorView d_q, d_k, d_v;      // as Q, K and V, in their dtype
  TensorView d_bias;             // float32 [B|1, Hq|1, Lq|1, Lk]: stride 0 where bias has it
  float* d_sinks = nullptr;      // [Hq]
};

// Whether the keys are a part of a longer sequence's.
ATTEND_HD inline bool HasPart(const Problem& p) { return p.key_offset != 0 || p.keys_after != 0; }

// OK, or INVALID_ARGUMENT or UNIMPLEMENTED naming what cannot be differentiated: an attention
// without LSE or with paged keys, the gradient of an absent bias or absent sinks, or of a mask of
// bits.
Status Check(const Attention& attention, const Gradients& gradients);

// FLOPs of the backward pass, recomputation included: 2 * (3 D + 2 Dv) per visible pair and query
// head.
double BackwardFlops(const Attention& attention);

}  // namespace attend

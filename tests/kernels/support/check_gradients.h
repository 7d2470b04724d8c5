// SPDX-License-Identifier: Apache-2.0
//
// Judges the gradients of a backward pass that computes in fp32, element by element, against the
// definition in double (reference_gradients.h), with a bound that is derived.
//
// Let u be fp32's unit roundoff and c(n) = (2 + sqrt(n) / 2) u what a sum of n products is off by,
// relative to the sum of their magnitudes: roundings add up like a random walk (Higham & Mary
// 2019). s(n) = (1 + n) 2^-150 is what it is off by beside that, as the roundings of subnormal
// numbers are not relative to them; z = max(1, |scale|). A row's query q, output gradient dO and
// keys are exact. Its O and LSE are the forward pass's, and may be off by what the bounds of
// check_rows.h allow; here that is measured, not bounded: e_LSE = |LSE - truth|, and delta is off
// by |dO . (O - truth)|, which contains O's rounding to its dtype. For one key, with x = score -
// LSE = log P and E the bound on the score's error (score_rounding.h):
//
//   P      rho = exp(E + e_LSE + 2 u |x|) - 1 + 4 u,     |err P| <= rho P + 2^-126
//          (x and the factor log2(e) are rounded; exp2 and its product are off by 2 units; weights
//          below fp32's normal numbers may be 0)
//   dP     c(Dv) sum |dO||V| + s(Dv)
//   less   = delta - dLSE: |dO . (O - truth)| + c(Dv) sum |dO||O| + s(Dv) + u |less|
//   m      = dP - less: the errors of both, and u |m|
//   dS     = P m: (P + err P) err m + err P |m| + 2 u |dS| + 2^-149
//   slope  1 - t^2, t = capped / softcap: err t = E / softcap, err slope = (2 + err t) err t + 4 u
//   dT     |scale| (slope err dS + |dS| err slope) + 2 u |dT| + z 2^-150
//
// and of the results, each with its rounding to its dtype (and fp32's for the product with scale):
//
//   dQ     sum err dT |K| + c(n) sum |dT||K| + z s(n) over the row's n keys
//   dK     sum err dT |Q| + c(n) sum |dT||Q| + z s(n) over the n rows that see the key
//   dV     sum err P |dO| + c(n) sum P |dO| + s(n) likewise
//   dBias  sum err dS + c(n) sum |dS| + s(n)
//   dSink  sum err P |less| + (P + err P) err less + c(n) sum P |less| + s(n) over n rows,
//          P = exp(sink - LSE), err P = P (exp(e_LSE) - 1)
//
// Where LSE is below -16 or above 64, passes may add up LSE and delta again. Then e_LSE has sum err
// P of the row's keys as well, and err less has sum err P |dP| + (c(Dv) + c(n)) sum P |dO||V|.
//
// A kernel of 16-bit products rounds P, and dS times its slope, once more before it multiplies them
// (u16, and half a step of subnormal numbers), and has score - LSE as a difference of two products
// with log2(e), each of which is off by 2 u. Dropout's factor is in dP, and in P as dV has it, and
// in the errors of both, which it makes 2 u larger: it is rounded, and so is the product with it.
// It is also in s(Dv) of dP and in s(n) of dV.
//
// NaN and Inf must be where the reference has them.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/contract/gradients.h"
#include "kernels/contract/problem.h"
#include "kernels/reference/reference_gradients.h"

namespace attend::test {

// A gradient's elements in double, and how far off each may be.
struct JudgedTensor {
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t dim = 0;
  double factor = 1;          // of sums, once they are rounded
  std::vector<double> value;  // [sequence][head][row][dim]
  std::vector<double> error;  // beside the rounding to the dtype
  std::vector<double> magnitude;
  std::vector<int64_t> terms;  // [sequence][head][row]

  void Resize(int64_t batch, int64_t heads, int64_t rows, int64_t dim);
  int64_t Row(int64_t b, int64_t h, int64_t row) const { return (b * heads + h) * rows + row; }
};

// The truth about an attention's gradients, whose O and LSE are there.
class GradientsJudge {
 public:
  // Both must stay; what `gradients` asks for is not read yet. `factors`: what a kernel rounds P
  // and dS to before it multiplies them with rows.
  GradientsJudge(const Attention& attention, const Gradients& gradients,
                 DType factors = DType::kFloat32);

  // Empty, or what is wrong with this answer and where.
  std::string Fault(const Gradients& answer) const;

 private:
  struct Row;
  struct Key;

  void AddRow(const RowId& id);
  Row RowOf(const RowId& id, bool has_keys) const;
  bool Rounds() const { return factors_ != DType::kFloat32; }
  double WeightError(const Row& row, const Key& key) const;
  // The keys without the bounds on their errors. Those of the row's sums are then complete.
  std::vector<Key> KeysOf(const std::vector<KeyGradient>& truths, Row* row) const;
  void BoundKey(const Row& row, Key* key) const;
  void AddKey(const Row& row, const Key& key);

  const Attention& a_;
  const Gradients& g_;
  const DType factors_;
  JudgedTensor d_q_, d_k_, d_v_, d_bias_, d_sinks_;
};

}  // namespace attend::test

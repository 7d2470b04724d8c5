// SPDX-License-Identifier: Apache-2.0
//
// What layers of sessions should hold, and random requests on them whose answers can be judged in
// double precision.

#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/server/support/messages.h"

namespace attend::test {

// K and V of a layer, token after token as the bytes of their elements.
struct LayerTokens {
  DType dtype = DType::kFloat32;
  int64_t heads_kv = 1;
  int64_t dim = 1;
  int64_t dim_v = 1;
  std::string k = {};  // [tokens, Hkv, D]
  std::string v = {};  // [tokens, Hkv, Dv]

  int64_t k_bytes() const { return heads_kv * dim * DTypeBytes(dtype); }  // of a token
  int64_t v_bytes() const { return heads_kv * dim_v * DTypeBytes(dtype); }
  int64_t length() const { return static_cast<int64_t>(k.size()) / k_bytes(); }
  void Truncate(int64_t length);
};

struct SessionStep {
  // The request brings the new rows; `sessions` has an entry for each layer, with its length, for
  // the caller to name. Judge knows all of K and V.
  WireProblem problem;
  int64_t rows = 0;                 // new ones, of each
  std::vector<std::string> k_rows;  // theirs, as LayerTokens has them
  std::vector<std::string> v_rows;
};

// A request that appends `rows` rows to each layer and asks for `len_q`, with features as
// RandomSpec draws them. All layers have one shape. Without rows, k and v may be there and empty.
SessionStep MakeSessionStep(const std::vector<const LayerTokens*>& layers, int64_t rows,
                            int64_t len_q, std::mt19937_64& random);

}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/session_steps.h"

#include <algorithm>
#include <cstring>

namespace attend::test {
namespace {

ProblemSpec StepSpec(const std::vector<const LayerTokens*>& layers, int64_t rows, int64_t len_q,
                     std::mt19937_64& random) {
  const LayerTokens& shape = *layers[0];
  ProblemSpec spec = RandomSpec(random());
  Problem& p = spec.problem;
  p.packed = false;
  p.dtype = shape.dtype;
  p.batch = std::ssize(layers);
  p.heads_q = shape.heads_kv * static_cast<int64_t>(1 + random() % 2);
  p.heads_kv = shape.heads_kv;
  p.len_q = len_q;
  p.dim = shape.dim;
  p.dim_v = shape.dim_v;
  if (spec.layout == Layout::kStrided) spec.layout = Layout::kBHLD;
  spec.q_lengths.clear();
  const bool padded = random() % 4 == 0;
  for (int64_t b = 0; b < p.batch && padded; ++b) {
    spec.q_lengths.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(len_q + 1)));
  }
  spec.kv_lengths.clear();
  for (const LayerTokens* layer : layers) spec.kv_lengths.push_back(layer->length() + rows);
  p.len_k = *std::max_element(spec.kv_lengths.begin(), spec.kv_lengths.end());
  return spec;
}

// Of one head's row in a token of `tokens`.
char* RowIn(std::string& tokens, int64_t token, int64_t token_bytes, int64_t head, int64_t bytes) {
  return tokens.data() + token * token_bytes + head * bytes;
}

// What the layer holds goes into sequence b of the problem, and the rows behind it come from there.
void Exchange(const LayerTokens& layer, int64_t b, int64_t rows, OwnedAttention& owned,
              std::string& k_rows, std::string& v_rows) {
  k_rows.resize(static_cast<size_t>(rows * layer.k_bytes()));
  v_rows.resize(static_cast<size_t>(rows * layer.v_bytes()));
  const int64_t length = layer.length();
  const auto k_bytes = layer.k_bytes() / layer.heads_kv, v_bytes = layer.v_bytes() / layer.heads_kv;
  for (int64_t h = 0; h < layer.heads_kv; ++h) {
    for (int64_t j = 0; j < length; ++j) {
      std::memcpy(owned.K(b, h, j, 0), &layer.k[j * layer.k_bytes() + h * k_bytes], k_bytes);
      std::memcpy(owned.V(b, h, j, 0), &layer.v[j * layer.v_bytes() + h * v_bytes], v_bytes);
    }
    for (int64_t n = 0; n < rows; ++n) {
      std::memcpy(RowIn(k_rows, n, layer.k_bytes(), h, k_bytes), owned.K(b, h, length + n, 0),
                  k_bytes);
      std::memcpy(RowIn(v_rows, n, layer.v_bytes(), h, v_bytes), owned.V(b, h, length + n, 0),
                  v_bytes);
    }
  }
}

// Rows of all sequences, in the layout of the wire.
std::string Raw(const std::vector<std::string>& sequences, int64_t rows, int64_t heads,
                int64_t row_bytes, bool heads_outside) {
  std::string raw;
  for (const std::string& tokens : sequences) {
    if (!heads_outside) {
      raw += tokens;
      continue;
    }
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t n = 0; n < rows; ++n) raw.append(tokens, (n * heads + h) * row_bytes, row_bytes);
    }
  }
  return raw;
}

}  // namespace

void LayerTokens::Truncate(int64_t length) {
  k.resize(std::min(k.size(), static_cast<size_t>(length * k_bytes())));
  v.resize(std::min(v.size(), static_cast<size_t>(length * v_bytes())));
}

SessionStep MakeSessionStep(const std::vector<const LayerTokens*>& layers, int64_t rows,
                            int64_t len_q, std::mt19937_64& random) {
  SessionStep step;
  step.rows = rows;
  WireProblem& problem = step.problem;
  problem.spec = StepSpec(layers, rows, len_q, random);
  problem.owned = MakeAttention(problem.spec, random());
  step.k_rows.resize(layers.size());
  step.v_rows.resize(layers.size());
  for (size_t b = 0; b < layers.size(); ++b) {
    Exchange(*layers[b], static_cast<int64_t>(b), rows, problem.owned, step.k_rows[b],
             step.v_rows[b]);
  }
  v1::AttendRequest& request = problem.request;
  request = ToRequest(problem.spec, problem.owned);
  request.clear_kv_lengths();
  for (const LayerTokens* layer : layers) request.add_sessions()->set_length(layer->length());
  const LayerTokens& shape = *layers[0];
  const bool heads_outside = problem.spec.layout == Layout::kBHLD;
  for (v1::Tensor* tensor : {request.mutable_k(), request.mutable_v()}) {
    tensor->set_shape(heads_outside ? 2 : 1, rows);
  }
  *request.mutable_raw(1) =
      Raw(step.k_rows, rows, shape.heads_kv, shape.k_bytes() / shape.heads_kv, heads_outside);
  *request.mutable_raw(2) =
      Raw(step.v_rows, rows, shape.heads_kv, shape.v_bytes() / shape.heads_kv, heads_outside);
  if (rows > 0 || random() % 2 == 0) return step;
  request.clear_k();
  request.clear_v();
  request.mutable_raw()->DeleteSubrange(1, 2);
  return step;
}

}  // namespace attend::test

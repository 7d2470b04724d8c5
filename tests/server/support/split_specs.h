// SPDX-License-Identifier: Apache-2.0
//
// Problems and memory for tests of split requests: of many shapes, and in one piece of memory as
// messages bring them or in several as shared memory does; and their parts, computed.

#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "server/split/split_parts.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/span_copies.h"

namespace attend::test {

// RandomSpec's, some with dropout, the packed ones with more sequences.
inline ProblemSpec SplittableSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  if (seed % 3 == 1) spec = WithDropout(std::move(spec), seed);
  if (!spec.problem.packed) return spec;
  std::mt19937_64 random(seed);
  spec.q_lengths.clear();
  spec.kv_lengths.clear();
  for (uint64_t n = 2 + random() % 5; n > 0; --n) {
    spec.q_lengths.push_back(static_cast<int64_t>(random() % 13));
    spec.kv_lengths.push_back(static_cast<int64_t>(random() % 13));
  }
  return spec;
}

// Where each tensor lies when a request has them in shared memory: three to five spans.
struct ScatteredInputs {
  Attention attention;  // of which q, k, v and bias lie in blocks of their own
  SpanList spans;       // those, and the rest where it was
  std::vector<Block> blocks;
};

// Moves the tensors of `owned`, whose outputs and small arrays stay where they are.
inline ScatteredInputs Scatter(const OwnedAttention& owned) {
  ScatteredInputs scattered;
  Attention& a = scattered.attention = owned.attention;
  const Problem& p = a.problem;
  const auto move = [&scattered](const void** data, int64_t bytes) {
    if (bytes == 0) return;
    scattered.blocks.push_back(MakeBlock(bytes));
    std::byte* const to = scattered.blocks.back().get();
    std::memcpy(to, *data, static_cast<size_t>(bytes));
    *data = to;
    scattered.spans.Add({to, bytes});
  };
  // From the first element to behind the last one.
  const auto extent = [](int64_t batch, int64_t stride_b, int64_t heads, int64_t stride_h,
                         int64_t rows, int64_t stride_l, int64_t columns) {
    if (batch == 0 || heads == 0 || rows == 0) return int64_t{0};
    return (batch - 1) * stride_b + (heads - 1) * stride_h + (rows - 1) * stride_l + columns;
  };
  const int64_t batch = p.packed ? 1 : p.batch;
  const auto tensor = [&](ConstTensorView& t, int64_t heads, int64_t rows, int64_t dim) {
    move(&t.data,
         extent(batch, t.stride_b, heads, t.stride_h, rows, t.stride_l, dim) * DTypeBytes(p.dtype));
  };
  tensor(a.q, p.heads_q, p.packed ? p.total_q : p.len_q, p.dim);
  tensor(a.k, p.heads_kv, p.packed ? p.total_k : p.len_k, p.dim);
  tensor(a.v, p.heads_kv, p.packed ? p.total_k : p.len_k, p.dim_v);
  if (p.has_bias) {
    move(&a.bias.data,
         RowBytes(a.bias.dtype, extent(p.batch, a.bias.stride_b, p.heads_q, a.bias.stride_h,
                                       p.len_q, a.bias.stride_q, p.len_k)));
  }
  scattered.spans.Add(owned.input);
  return scattered;
}

// The parts of `owned`'s attention, each computed in copies of its spans. They hold blocks of
// `pool`.
inline Result<std::vector<std::unique_ptr<Request>>> ComputeParts(
    const OwnedAttention& owned, const std::vector<QuerySlice>& pieces, HostPool& pool) {
  Request whole;
  whole.attention = owned.attention;
  whole.input_spans = {owned.input};
  whole.output_spans = {owned.output};
  Result<std::vector<std::unique_ptr<Request>>> parts = MakeParts(whole, pieces, pool);
  if (!parts.ok()) return parts;
  for (const auto& part : *parts) {
    ATTEND_RETURN_IF_ERROR(Check(part->attention.problem));
    const WorkItem item = {part->attention, {}, part->input_spans, part->output_spans};
    ATTEND_RETURN_IF_ERROR(test::ComputeInCopies(item, CpuReference));
  }
  return parts;
}

}  // namespace attend::test

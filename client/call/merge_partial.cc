// SPDX-License-Identifier: Apache-2.0

#include "client/call/merge_partial.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "kernels/contract/dtype.h"
#include "kernels/contract/softmax_state.h"

namespace attend::client {
namespace {

using Gradient = std::optional<HostTensor> GradientTensors::*;

std::string Part(size_t index) { return "parts[" + std::to_string(index) + "]"; }

// [B, H, L] of the answer.
struct Rows {
  int64_t batch = 1;
  int64_t heads = 0;
  int64_t length = 0;
  int64_t dim = 0;  // of O

  int64_t count() const { return batch * heads * length; }
};

Result<Rows> RowsOf(const AttentionResult& part, v1::Layout layout) {
  const size_t rank = layout == v1::LAYOUT_LHD ? 3 : 4;
  const std::vector<int64_t>& o = part.o.shape;
  const std::vector<int64_t>& lse = part.lse->shape;
  if (o.size() != rank || lse.size() != rank - 1) {
    return InvalidArgument("parts[0] has an o of shape " + ShapeText(o) + " and an lse of " +
                           ShapeText(lse) + ", which the layout does not have");
  }
  Rows rows;
  if (rank == 4) rows.batch = lse[0];
  rows.heads = lse[rank - 3];
  rows.length = lse[rank - 2];
  rows.dim = o.back();
  std::vector<int64_t> expected = {rows.batch, rows.heads, rows.length, rows.dim};
  if (layout != v1::LAYOUT_BHLD) std::swap(expected[1], expected[2]);
  if (rank == 3) expected.erase(expected.begin());
  if (o == expected) return rows;
  return InvalidArgument("parts[0] has an o of shape " + ShapeText(o) + ", must be " +
                         ShapeText(expected) + " as its lse is");
}

Status CheckParts(const std::vector<AttentionResult>& parts) {
  if (parts.empty()) return InvalidArgument("parts has 0 entries, must have at least 1");
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].lse) return InvalidArgument(Part(i) + " has no lse (return_lse)");
    if (parts[i].o.dtype != DType::kFloat32) {
      return InvalidArgument(Part(i) + " has an o of " + std::string(DTypeName(parts[i].o.dtype)) +
                             ", must be float32 (o_float32)");
    }
    if (parts[i].o.shape == parts[0].o.shape && parts[i].lse->shape == parts[0].lse->shape) {
      continue;
    }
    return InvalidArgument(Part(i) + " has an o of shape " + ShapeText(parts[i].o.shape) +
                           ", parts[0] of " + ShapeText(parts[0].o.shape));
  }
  return Status();
}

const float* Floats(const HostTensor& tensor) {
  return reinterpret_cast<const float*>(tensor.data.get());
}
float* MutableFloats(const HostTensor& tensor) {
  return reinterpret_cast<float*>(tensor.data.get());
}

// One row: `at` of LSE, `o` of O's first element.
void MergeRow(const std::vector<AttentionResult>& parts, int64_t at, int64_t o, int64_t dim,
              std::vector<double>* sums, AttentionResult* merged) {
  SoftmaxState<double> state;
  std::fill(sums->begin(), sums->end(), 0.0);
  for (const AttentionResult& part : parts) {
    const double lse = Floats(*part.lse)[at];
    if (lse == -std::numeric_limits<double>::infinity()) continue;  // it saw no key
    const MergeWeights<double> weights = Merge(state, SoftmaxState<double>{lse, 1.0});
    const float* const row = Floats(part.o) + o;
    for (int64_t d = 0; d < dim; ++d) {
      (*sums)[d] = weights.left * (*sums)[d] + weights.right * row[d];
    }
  }
  const double inverse = InverseSum(state);
  for (int64_t d = 0; d < dim; ++d) {
    MutableFloats(merged->o)[o + d] = static_cast<float>(inverse * (*sums)[d]);
  }
  MutableFloats(*merged->lse)[at] = static_cast<float>(LogSumExp(state));
}

// The parts' gradient of that name; of none of them, or of all unless `some` may have it.
Result<std::vector<const HostTensor*>> Gather(const std::vector<AttentionResult>& parts,
                                              const char* name, Gradient gradient, bool some) {
  std::vector<const HostTensor*> found;
  size_t without = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].gradients) return InvalidArgument(Part(i) + " has no gradients");
    const std::optional<HostTensor>& each = *parts[i].gradients.*gradient;
    if (each) found.push_back(&*each);
    if (!each) without = i;
  }
  if (some || found.empty() || found.size() == parts.size()) return found;
  return InvalidArgument(Part(without) + " has no " + name + ", which others have");
}

Result<std::optional<HostTensor>> Sum(const std::vector<const HostTensor*>& parts,
                                      const char* name) {
  std::optional<HostTensor> sum;
  if (parts.empty()) return sum;
  Result<HostTensor> made = HostTensor::Make(name, DType::kFloat32, parts.front()->shape);
  if (!made.ok()) return made.status();
  const int64_t count = made->bytes / DTypeBytes(DType::kFloat32);
  std::vector<double> sums(static_cast<size_t>(count));
  for (const HostTensor* const part : parts) {
    if (part->shape != made->shape) {
      return InvalidArgument(std::string(name) + " has the shapes " + ShapeText(part->shape) +
                             " and " + ShapeText(made->shape) + ", must have one");
    }
    for (int64_t i = 0; i < count; ++i) {
      sums[i] += LoadElementAsDouble(part->data.get(), part->dtype, i);
    }
  }
  for (int64_t i = 0; i < count; ++i) MutableFloats(*made)[i] = static_cast<float>(sums[i]);
  sum = std::move(*made);
  return sum;
}

// One after the other along `axis`, which may count from the end.
Result<std::optional<HostTensor>> Join(const std::vector<const HostTensor*>& parts,
                                       const char* name, int axis) {
  std::optional<HostTensor> joined;
  if (parts.empty()) return joined;
  std::vector<int64_t> shape = parts.front()->shape;
  const size_t at =
      axis < 0 ? shape.size() - static_cast<size_t>(-axis) : static_cast<size_t>(axis);
  shape[at] = 0;
  for (const HostTensor* const part : parts) {
    std::vector<int64_t> other = part->shape;
    const int64_t keys = std::exchange(other[at], shape[at]);
    if (other != shape || part->dtype != parts.front()->dtype) {
      return InvalidArgument(std::string(name) + " has the shapes " + ShapeText(part->shape) +
                             " and " + ShapeText(parts.front()->shape) +
                             ", must differ by their keys alone");
    }
    shape[at] += keys;
  }
  Result<HostTensor> made = HostTensor::Make(name, parts.front()->dtype, shape);
  if (!made.ok()) return made.status();
  int64_t outer = 1;
  for (size_t i = 0; i < at; ++i) outer *= shape[i];
  std::byte* to = made->data.get();
  for (int64_t i = 0; i < outer; ++i) {
    for (const HostTensor* const part : parts) {
      const int64_t bytes = part->bytes / outer;
      if (bytes > 0) std::memcpy(to, part->data.get() + i * bytes, static_cast<size_t>(bytes));
      to += bytes;
    }
  }
  joined = std::move(*made);
  return joined;
}

}  // namespace

Result<AttentionResult> MergePartial(const std::vector<AttentionResult>& parts, v1::Layout layout) {
  ATTEND_RETURN_IF_ERROR(CheckParts(parts));
  const Result<Rows> rows = RowsOf(parts.front(), layout);
  if (!rows.ok()) return rows.status();
  AttentionResult merged;
  Result<HostTensor> o = HostTensor::Make("o", DType::kFloat32, parts.front().o.shape);
  if (!o.ok()) return o.status();
  Result<HostTensor> lse = HostTensor::Make("lse", DType::kFloat32, parts.front().lse->shape);
  if (!lse.ok()) return lse.status();
  merged.o = std::move(*o);
  merged.lse = std::move(*lse);
  std::vector<double> sums(static_cast<size_t>(rows->dim));
  for (int64_t at = 0; at < rows->count(); ++at) {
    int64_t row = at;
    if (layout != v1::LAYOUT_BHLD) {
      const int64_t l = at % rows->length, h = at / rows->length % rows->heads;
      row = (at / (rows->length * rows->heads) * rows->length + l) * rows->heads + h;
    }
    MergeRow(parts, at, row * rows->dim, rows->dim, &sums, &merged);
  }
  return merged;
}

Result<GradientTensors> MergePartialGradients(const std::vector<AttentionResult>& parts,
                                              v1::Layout layout) {
  if (parts.empty()) return InvalidArgument("parts has 0 entries, must have at least 1");
  if (layout == v1::LAYOUT_LHD) {
    return InvalidArgument("layout is LHD, whose sequences have keys of every part: cut them");
  }
  const int keys = layout == v1::LAYOUT_BLHD ? 1 : 2;
  struct Kind {
    const char* name;
    Gradient gradient;
    std::optional<int> axis;  // none: summed
    bool some = false;        // not every part has it
  };
  GradientTensors merged;
  for (const Kind& kind :
       {Kind{"d_q", &GradientTensors::d_q, {}}, Kind{"d_k", &GradientTensors::d_k, keys},
        Kind{"d_v", &GradientTensors::d_v, keys}, Kind{"d_bias", &GradientTensors::d_bias, -1},
        Kind{"d_sinks", &GradientTensors::d_sinks, {}, true}}) {
    const Result<std::vector<const HostTensor*>> found =
        Gather(parts, kind.name, kind.gradient, kind.some);
    if (!found.ok()) return found.status();
    Result<std::optional<HostTensor>> made =
        kind.axis ? Join(*found, kind.name, *kind.axis) : Sum(*found, kind.name);
    if (!made.ok()) return made.status();
    merged.*kind.gradient = std::move(*made);
  }
  return merged;
}

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Idea: a part's O and LSE are the state of an online softmax over its keys, with maximum LSE and
// sum 1. Merging two states (Merge in kernels/contract) rescales both sums to the common maximum
// and is associative, so parts merge in any order; a sink is one more state without a value. Each
// row is accumulated in double and rounded to float32 once.

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

// B, H, L, D of an answer.
struct Rows {
  int64_t batch = 1;
  int64_t heads = 0;
  int64_t length = 0;
  int64_t dim = 0;  // of O

  int64_t count() const { return batch * heads * length; }
  // Index of the row in O, given its index in LSE: the two have different dimension orders.
  int64_t RowOfO(int64_t at, v1::Layout layout) const {
    if (layout == v1::LAYOUT_BHLD) return at;
    const int64_t l = at % length, h = at / length % heads;
    return (at / (length * heads) * length + l) * heads + h;
  }
  std::vector<int64_t> ShapeOfO(v1::Layout layout) const {
    if (layout == v1::LAYOUT_LHD) return {length, heads, dim};
    if (layout == v1::LAYOUT_BLHD) return {batch, length, heads, dim};
    return {batch, heads, length, dim};
  }
  std::vector<int64_t> ShapeOfLse(v1::Layout layout) const {
    if (layout == v1::LAYOUT_LHD) return {heads, length};
    return {batch, heads, length};
  }
};

// A part and the position of its rows in the whole.
struct Place {
  const AttentionResult* part;
  int64_t first_row;
  Rows rows;
};

Result<Rows> RowsOf(const std::string& name, const AttentionResult& part, v1::Layout layout) {
  if (!part.lse) return InvalidArgument(name + " has no lse (return_lse)");
  if (part.o.dtype != DType::kFloat32) {
    return InvalidArgument(name + " has an o of " + std::string(DTypeName(part.o.dtype)) +
                           ", must be float32 (o_float32)");
  }
  const size_t rank = layout == v1::LAYOUT_LHD ? 3 : 4;
  const std::vector<int64_t>& o = part.o.shape;
  const std::vector<int64_t>& lse = part.lse->shape;
  if (o.size() != rank || lse.size() != rank - 1) {
    return InvalidArgument(name + " has an o of shape " + ShapeText(o) + " and an lse of " +
                           ShapeText(lse) + ", which the layout does not have");
  }
  Rows rows;
  if (rank == 4) rows.batch = lse[0];
  rows.heads = lse[rank - 3];
  rows.length = lse[rank - 2];
  rows.dim = o.back();
  if (o == rows.ShapeOfO(layout)) return rows;
  return InvalidArgument(name + " has an o of shape " + ShapeText(o) + ", must be " +
                         ShapeText(rows.ShapeOfO(layout)) + " as its lse is");
}

// Checks that the parts fit together and returns the whole's dimensions: `rows` rows, or as many as
// the first part has.
Result<Rows> Fit(const std::vector<PartialRows>& parts, std::optional<int64_t> rows,
                 v1::Layout layout, std::vector<Place>* places) {
  if (parts.empty()) return InvalidArgument("parts has 0 entries, must have at least 1");
  Rows whole;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [part, first] = parts[i];
    const Result<Rows> own = RowsOf(Part(i), *part, layout);
    if (!own.ok()) return own.status();
    if (i == 0) whole = *own;
    if (i == 0 && rows) whole.length = *rows;
    Rows other = *own;
    if (rows) other.length = whole.length;
    if (other.ShapeOfO(layout) != whole.ShapeOfO(layout)) {
      return InvalidArgument(Part(i) + " has an o of shape " + ShapeText(part->o.shape) +
                             ", parts[0] of " + ShapeText(parts[0].answer->o.shape));
    }
    if (first < 0 || own->length > whole.length - first) {
      return InvalidArgument(Part(i) + " has " + std::to_string(own->length) + " rows from row " +
                             std::to_string(first) + " on, but the whole has " +
                             std::to_string(whole.length));
    }
    places->push_back({part, first, *own});
  }
  return whole;
}

const float* Floats(const HostTensor& tensor) {
  return reinterpret_cast<const float*>(tensor.data.get());
}
float* MutableFloats(const HostTensor& tensor) {
  return reinterpret_cast<float*>(tensor.data.get());
}

// Merges one row; `at` is its index in the whole's LSE.
void MergeRow(const std::vector<Place>& places, const Rows& whole, v1::Layout layout,
              std::optional<float> sink, int64_t at, std::vector<double>* sums,
              AttentionResult* merged) {
  SoftmaxState<double> state;
  std::fill(sums->begin(), sums->end(), 0.0);
  if (sink) AddSink(state, static_cast<double>(*sink));
  for (const Place& place : places) {
    const int64_t row = at % whole.length - place.first_row;
    if (row < 0 || row >= place.rows.length) continue;
    const int64_t own = at / whole.length * place.rows.length + row;
    const double lse = Floats(*place.part->lse)[own];
    if (lse == -std::numeric_limits<double>::infinity()) continue;  // the part sees no key
    const MergeWeights<double> weights = Merge(state, SoftmaxState<double>{lse, 1.0});
    const float* const o = Floats(place.part->o) + place.rows.RowOfO(own, layout) * whole.dim;
    for (int64_t d = 0; d < whole.dim; ++d) {
      (*sums)[d] = weights.left * (*sums)[d] + weights.right * o[d];
    }
  }
  const double inverse = InverseSum(state);
  float* const o = MutableFloats(merged->o) + whole.RowOfO(at, layout) * whole.dim;
  for (int64_t d = 0; d < whole.dim; ++d) o[d] = static_cast<float>(inverse * (*sums)[d]);
  MutableFloats(*merged->lse)[at] = static_cast<float>(LogSumExp(state));
}

Result<AttentionResult> MergeRows(const std::vector<Place>& places, const Rows& whole,
                                  const std::vector<float>& sinks, v1::Layout layout) {
  AttentionResult merged;
  Result<HostTensor> o = HostTensor::Make("o", DType::kFloat32, whole.ShapeOfO(layout));
  if (!o.ok()) return o.status();
  Result<HostTensor> lse = HostTensor::Make("lse", DType::kFloat32, whole.ShapeOfLse(layout));
  if (!lse.ok()) return lse.status();
  merged.o = std::move(*o);
  merged.lse = std::move(*lse);
  std::vector<double> sums(static_cast<size_t>(whole.dim));
  for (int64_t at = 0; at < whole.count(); ++at) {
    std::optional<float> sink;
    if (!sinks.empty()) sink = sinks[static_cast<size_t>(at / whole.length % whole.heads)];
    MergeRow(places, whole, layout, sink, at, &sums, &merged);
  }
  return merged;
}

// The parts' gradients of that name. Either all parts have it or none, unless `some` is set.
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
  return InvalidArgument(Part(without) + " has no " + name + ", but other parts have one");
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

// Concatenates along `axis`, which may be negative to count from the end.
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
  std::vector<PartialRows> all;
  for (const AttentionResult& part : parts) all.push_back({&part, 0});
  std::vector<Place> places;
  const Result<Rows> whole = Fit(all, std::nullopt, layout, &places);
  if (!whole.ok()) return whole.status();
  return MergeRows(places, *whole, {}, layout);
}

Result<AttentionResult> MergePartial(const std::vector<PartialRows>& parts, int64_t rows,
                                     const std::vector<float>& sinks, v1::Layout layout) {
  if (layout == v1::LAYOUT_LHD) {
    return InvalidArgument("layout is LHD, whose rows are of several sequences");
  }
  std::vector<Place> places;
  const Result<Rows> whole = Fit(parts, rows, layout, &places);
  if (!whole.ok()) return whole.status();
  if (!sinks.empty() && std::ssize(sinks) != whole->heads) {
    return InvalidArgument("sinks has " + std::to_string(sinks.size()) +
                           " entries, must have Hq = " + std::to_string(whole->heads) + ", or 0");
  }
  return MergeRows(places, *whole, sinks, layout);
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
    std::optional<int> axis;  // unset: summed
    bool some = false;        // some parts may lack it
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

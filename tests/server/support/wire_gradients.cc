// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/wire_gradients.h"

#include <cstring>
#include <utility>
#include <vector>

#include "kernels/reference/cpu_reference.h"
#include "tests/kernels/support/check_gradients.h"
#include "tests/server/support/messages.h"

namespace attend::test {
namespace {

ProblemSpec Trained(ProblemSpec spec) {
  spec.problem.return_lse = true;
  return spec;
}

OwnedAttention Forward(const ProblemSpec& spec, uint64_t seed) {
  OwnedAttention owned = MakeAttention(spec, seed);
  CpuReference(owned.attention);
  return owned;
}

// A tensor on the wire: its shape, and where its rows of `dim` elements are in memory, in order.
struct WireRows {
  std::vector<int64_t> shape;
  int64_t dim = 0;
  std::vector<int64_t> rows;  // elements
};

template <class View>
WireRows RowsOf(const Attention& a, bool heads_outside, const View& view, bool keys, int64_t heads,
                int64_t dim) {
  const Problem& p = a.problem;
  const int64_t length = keys ? (p.packed ? p.total_k : p.len_k) : (p.packed ? p.total_q : p.len_q);
  const bool heads_first = !p.packed && heads_outside;
  const int64_t batch = p.packed ? 1 : p.batch;
  WireRows wire{{}, dim, {}};
  if (!p.packed) wire.shape.push_back(p.batch);
  for (const int64_t n : {heads_first ? heads : length, heads_first ? length : heads, dim}) {
    wire.shape.push_back(n);
  }
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t n = 0; n < heads * length; ++n) {
      const int64_t h = heads_first ? n / length : n % heads;
      const int64_t l = heads_first ? n % length : n / heads;
      wire.rows.push_back(b * view.stride_b + h * view.stride_h + l * view.stride_l);
    }
  }
  return wire;
}

WireRows NumbersOf(const Attention& a) {
  const Problem& p = a.problem;
  const int64_t rows = p.packed ? p.total_q : p.len_q;
  WireRows wire{{}, rows, {}};
  if (!p.packed) wire.shape.push_back(p.batch);
  wire.shape.push_back(p.heads_q);
  wire.shape.push_back(rows);
  for (int64_t b = 0; b < (p.packed ? 1 : p.batch); ++b) {
    for (int64_t h = 0; h < p.heads_q; ++h) {
      wire.rows.push_back(b * a.lse_stride_b + h * a.lse_stride_h);
    }
  }
  return wire;
}

WireRows BiasRows(const ProblemSpec& spec, const Problem& p, const TensorView& view) {
  WireRows wire{{spec.bias_per_sequence ? p.batch : 1, spec.bias_per_head ? p.heads_q : 1,
                 spec.bias_per_query ? p.len_q : 1, p.len_k},
                p.len_k,
                {}};
  for (int64_t b = 0; b < wire.shape[0]; ++b) {
    for (int64_t h = 0; h < wire.shape[1]; ++h) {
      for (int64_t i = 0; i < wire.shape[2]; ++i) {
        wire.rows.push_back(b * view.stride_b + h * view.stride_h + i * view.stride_l);
      }
    }
  }
  return wire;
}

void Put(const WireRows& wire, DType dtype, const void* data, v1::Tensor* tensor,
         v1::AttendRequest* request) {
  tensor->set_dtype(static_cast<v1::DType>(dtype));
  tensor->mutable_shape()->Assign(wire.shape.begin(), wire.shape.end());
  const int64_t size = DTypeBytes(dtype);
  std::string bytes;
  for (const int64_t row : wire.rows) {
    bytes.append(static_cast<const char*>(data) + row * size, static_cast<size_t>(wire.dim * size));
  }
  request->add_raw(std::move(bytes));
}

// Takes the next entries of an answer.
class Taker {
 public:
  explicit Taker(const v1::AttendResponse& response) : response_(response) {}

  void Take(const char* name, bool wanted, bool there, const v1::Tensor& meta, const WireRows& wire,
            DType dtype, void* to) {
    if (wanted != there) return Fault(name, "is there, or not");
    if (!wanted) return;
    const std::vector<int64_t> shape(meta.shape().begin(), meta.shape().end());
    if (shape != wire.shape) return Fault(name, "has another shape");
    if (meta.dtype() != static_cast<v1::DType>(dtype)) return Fault(name, "has another dtype");
    const auto row_bytes = static_cast<size_t>(wire.dim * DTypeBytes(dtype));
    if (next_ == response_.raw_size()) return Fault(name, "has no bytes");
    const std::string& bytes = response_.raw(next_++);
    if (bytes.size() != row_bytes * wire.rows.size()) return Fault(name, "has other bytes");
    size_t at = 0;
    for (const int64_t row : wire.rows) {
      std::memcpy(static_cast<char*>(to) + row * DTypeBytes(dtype), bytes.data() + at, row_bytes);
      at += row_bytes;
    }
  }
  std::string fault() const {
    if (fault_.empty() && next_ != response_.raw_size()) return "more bytes than tensors";
    return fault_;
  }

 private:
  void Fault(const char* name, const char* what) {
    if (fault_.empty()) fault_ = std::string(name) + " " + what;
  }

  const v1::AttendResponse& response_;
  int next_ = 0;
  std::string fault_;
};

}  // namespace

WireGradients::WireGradients(ProblemSpec spec, uint64_t seed)
    : spec_(Trained(std::move(spec))),
      owned_(Forward(spec_, seed)),
      gradients_(owned_.attention, seed + 1) {
  const Attention& a = owned_.attention;
  const Problem& p = a.problem;
  request = ToRequest(spec_, owned_);
  request.set_request_id("backward-" + std::to_string(seed));
  request.set_return_lse(false);
  v1::BackwardPass& backward = *request.mutable_backward();
  const WireRows o = RowsOf(a, heads_outside_, a.o, false, p.heads_q, p.dim_v);
  Put(o, p.o_dtype(), a.o.data, backward.mutable_o(), &request);
  Put(NumbersOf(a), DType::kFloat32, a.lse, backward.mutable_lse(), &request);
  Put(o, p.o_dtype(), gradients_.get().d_o.data, backward.mutable_d_o(), &request);
  Put(NumbersOf(a), DType::kFloat32, gradients_.get().d_lse, backward.mutable_d_lse(), &request);
  for (int name = v1::TENSOR_NAME_D_Q; name <= v1::TENSOR_NAME_D_V; ++name) {
    backward.add_wanted(static_cast<v1::TensorName>(name));
  }
  if (p.has_bias && a.bias.dtype != DType::kBit) backward.add_wanted(v1::TENSOR_NAME_D_BIAS);
  if (p.has_sinks) backward.add_wanted(v1::TENSOR_NAME_D_SINKS);
}

std::string WireGradients::Judge(const v1::AttendResponse& response) {
  const Attention& a = owned_.attention;
  const Problem& p = a.problem;
  if (response.has_o() || response.has_lse()) return "it has O or LSE";
  const v1::BackwardPass& asked = request.backward();
  const auto wanted = [&](v1::TensorName name) {
    if (asked.wanted_size() == 0) return name <= v1::TENSOR_NAME_D_V;
    return std::count(asked.wanted().begin(), asked.wanted().end(), name) > 0;
  };
  const v1::Gradients& got = response.gradients();
  Gradients& g = gradients_.get();
  Gradients answer = g;
  Taker taker(response);
  const auto take = [&](const char* name, v1::TensorName number, bool there, const v1::Tensor& meta,
                        const WireRows& wire, DType dtype, auto& to) {
    taker.Take(name, wanted(number), there, meta, wire, dtype, to);
    if (!wanted(number)) to = nullptr;
  };
  take("d_q", v1::TENSOR_NAME_D_Q, got.has_d_q(), got.d_q(),
       RowsOf(a, heads_outside_, g.d_q, false, p.heads_q, p.dim), p.dtype, answer.d_q.data);
  take("d_k", v1::TENSOR_NAME_D_K, got.has_d_k(), got.d_k(),
       RowsOf(a, heads_outside_, g.d_k, true, p.heads_kv, p.dim), p.dtype, answer.d_k.data);
  take("d_v", v1::TENSOR_NAME_D_V, got.has_d_v(), got.d_v(),
       RowsOf(a, heads_outside_, g.d_v, true, p.heads_kv, p.dim_v), p.dtype, answer.d_v.data);
  take("d_bias", v1::TENSOR_NAME_D_BIAS, got.has_d_bias(), got.d_bias(),
       BiasRows(spec_, p, g.d_bias), DType::kFloat32, answer.d_bias.data);
  take("d_sinks", v1::TENSOR_NAME_D_SINKS, got.has_d_sinks(), got.d_sinks(),
       WireRows{{p.heads_q}, p.heads_q, {0}}, DType::kFloat32, answer.d_sinks);
  if (const std::string fault = taker.fault(); !fault.empty()) return fault;
  return GradientsJudge(a, g).Fault(answer);
}

}  // namespace attend::test

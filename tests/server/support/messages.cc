// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/messages.h"

#include <algorithm>
#include <cstring>

#include "kernels/reference/check_rows.h"

namespace attend::test {
namespace {

enum class Order { kBhld, kBlhd, kLhd };

Order OrderOf(const ProblemSpec& spec) {
  if (spec.problem.packed) return Order::kLhd;
  return spec.layout == Layout::kBHLD ? Order::kBhld : Order::kBlhd;
}

// Calls visit(b, h, l) for every row of a tensor in wire order.
template <class Visit>
void ForRows(Order order, int64_t batch, int64_t heads, int64_t rows, const Visit& visit) {
  if (order == Order::kBhld) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t l = 0; l < rows; ++l) visit(b, h, l);
    return;
  }
  for (int64_t b = 0; b < (order == Order::kLhd ? 1 : batch); ++b)
    for (int64_t l = 0; l < rows; ++l)
      for (int64_t h = 0; h < heads; ++h) visit(b, h, l);
}

void SetShape(Order order, int64_t batch, int64_t heads, int64_t rows, int64_t dim,
              v1::Tensor* tensor) {
  std::vector<int64_t> shape;
  if (order == Order::kBhld) shape = {batch, heads, rows, dim};
  if (order == Order::kBlhd) shape = {batch, rows, heads, dim};
  if (order == Order::kLhd) shape = {rows, heads, dim};
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
}

std::string Gather(Order order, const ConstTensorView& view, DType dtype, int64_t batch,
                   int64_t heads, int64_t rows, int64_t dim) {
  const int64_t size = DTypeBytes(dtype);
  std::string bytes;
  ForRows(order, batch, heads, rows, [&](int64_t b, int64_t h, int64_t l) {
    const int64_t at = b * view.stride_b + h * view.stride_h + l * view.stride_l;
    bytes.append(static_cast<const char*>(view.data) + at * size, static_cast<size_t>(dim * size));
  });
  return bytes;
}

void FillMask(const Mask& mask, v1::Mask* message) {
  const bool top_left = mask.alignment == Alignment::kTopLeft;
  if (mask.unrestricted() && !top_left) return;
  if (mask.right == 0) {
    message->set_kind(top_left ? v1::Mask::KIND_CAUSAL_TOP_LEFT
                               : v1::Mask::KIND_CAUSAL_BOTTOM_RIGHT);
  } else {
    message->set_kind(top_left ? v1::Mask::KIND_WINDOW_TOP_LEFT
                               : v1::Mask::KIND_WINDOW_BOTTOM_RIGHT);
    message->set_window_right(mask.right);
  }
  if (mask.left >= 0) message->set_window_left(mask.left);
}

template <class T>
void FillArray(const T* values, int64_t count, google::protobuf::RepeatedField<T>* field) {
  if (values != nullptr) field->Add(values, values + count);
}

void FillBias(const ProblemSpec& spec, const Attention& a, v1::AttendRequest* request) {
  const Problem& p = a.problem;
  v1::Tensor* bias = request->mutable_bias();
  bias->set_dtype(static_cast<v1::DType>(a.bias.dtype));
  bias->add_shape(spec.bias_per_sequence ? p.batch : 1);
  bias->add_shape(spec.bias_per_head ? p.heads_q : 1);
  bias->add_shape(spec.bias_per_query ? p.len_q : 1);
  bias->add_shape(p.len_k);
  std::string bytes;
  ForRows(Order::kBhld, bias->shape(0), bias->shape(1), bias->shape(2),
          [&](int64_t b, int64_t h, int64_t i) {
            const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q;
            bytes.append(static_cast<const char*>(a.bias.data) + RowBytes(a.bias.dtype, at),
                         static_cast<size_t>(RowBytes(a.bias.dtype, p.len_k)));
          });
  request->add_raw(std::move(bytes));
}

// Whether the draft's bit [b, i, j] of a request is 1.
bool SeesInDraft(const v1::AttendRequest& request, int64_t b, int64_t i, int64_t j) {
  const int64_t tokens = request.tree_tokens(), row_bytes = (tokens + 7) / 8;
  const bool own = std::ssize(request.tree()) > tokens * row_bytes;
  const int64_t at = ((own ? b * tokens : 0) + i) * row_bytes + j / 8;
  return (static_cast<uint8_t>(request.tree()[static_cast<size_t>(at)]) >> (j % 8) & 1) != 0;
}

// Gives the request a random tree in place of its bias, which is of bits for each sequence and
// query, and makes that bias what the tree means, bit by bit.
void BiasToTree(uint64_t seed, const Attention& a, v1::AttendRequest* request) {
  std::mt19937_64 random(seed);
  const Problem& p = a.problem;
  request->clear_bias();
  request->mutable_raw()->RemoveLast();
  const int64_t tokens = 1 + static_cast<int64_t>(random() % 70);
  const int64_t trees = random() % 2 == 0 ? 1 : p.batch;
  request->set_tree_tokens(tokens);
  for (int64_t n = 0; n < trees * tokens * ((tokens + 7) / 8); ++n) {
    request->mutable_tree()->push_back(static_cast<char>(random()));
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    const int64_t most = std::min({tokens, s.q_len, s.k_len});
    const int64_t draft = random() % 2 == 0 ? most : static_cast<int64_t>(random()) & most;
    request->add_tree_lengths(draft);
    for (int64_t i = 0; i < s.q_len; ++i) {
      auto* const row = static_cast<uint8_t*>(const_cast<void*>(a.bias.data)) +
                        (b * a.bias.stride_b + i * a.bias.stride_q) / 8;
      for (int64_t j = 0; j < s.k_len; ++j) {
        const int64_t row_in = i - (s.q_len - draft), key_in = j - (s.k_len - draft);
        const bool sees = row_in < 0 || key_in < 0 || SeesInDraft(*request, b, row_in, key_in);
        const auto bit = static_cast<uint8_t>(1u << (j % 8));
        row[j / 8] = static_cast<uint8_t>(sees ? row[j / 8] | bit : row[j / 8] & ~bit);
      }
    }
  }
}

}  // namespace

v1::AttendRequest ToRequest(const ProblemSpec& spec, const OwnedAttention& owned) {
  const Attention& a = owned.attention;
  const Problem& p = a.problem;
  const Order order = OrderOf(spec);
  v1::AttendRequest request;
  request.set_layout(order == Order::kBhld   ? v1::LAYOUT_BHLD
                     : order == Order::kBlhd ? v1::LAYOUT_BLHD
                                             : v1::LAYOUT_LHD);
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const auto tensor = [&](const ConstTensorView& view, int64_t heads, int64_t rows, int64_t dim,
                          v1::Tensor* message) {
    message->set_dtype(static_cast<v1::DType>(p.dtype));
    SetShape(order, p.batch, heads, rows, dim, message);
    request.add_raw(Gather(order, view, p.dtype, p.batch, heads, rows, dim));
  };
  tensor(a.q, p.heads_q, rows_q, p.dim, request.mutable_q());
  tensor(a.k, p.heads_kv, rows_k, p.dim, request.mutable_k());
  tensor(a.v, p.heads_kv, rows_k, p.dim_v, request.mutable_v());
  if (p.has_bias) FillBias(spec, a, &request);
  if (p.packed) {
    FillArray(a.q_offsets, p.batch + 1, request.mutable_cu_q());
    FillArray(a.kv_offsets, p.batch + 1, request.mutable_cu_kv());
  } else {
    FillArray(a.q_lengths, p.batch, request.mutable_q_lengths());
    FillArray(a.kv_lengths, p.batch, request.mutable_kv_lengths());
  }
  request.set_scale(p.scale);
  FillMask(p.mask, request.mutable_mask());
  request.set_softcap(p.softcap);
  if (p.has_alibi) {
    FillArray(a.alibi_slopes, (a.alibi_stride_b != 0 ? p.batch : 1) * p.heads_q,
              request.mutable_alibi_slopes());
  }
  if (p.has_sinks) FillArray(a.sinks, p.heads_q, request.mutable_sinks());
  request.set_dropout_p(static_cast<float>(p.dropout) / kDropoutOne);
  if (p.dropout > 0) request.set_dropout_seed(a.dropout.seed);
  request.set_return_lse(p.return_lse);
  if (p.o_float32) request.set_o_dtype(v1::DTYPE_FLOAT32);
  return request;
}

ProblemSpec RandomWireSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  if (seed % 4 != 1) return spec;
  spec = WithDropout(std::move(spec), seed);
  spec.dropout = {.seed = spec.dropout.seed};
  return spec;
}

WireProblem RandomWireProblem(uint64_t seed, double work_max, bool trees) {
  WireProblem problem;
  problem.spec = RandomWireSpec(seed, work_max);
  Problem& p = problem.spec.problem;
  const bool tree = trees && seed % 3 == 2 && p.batch > 0 && !p.has_bias;
  if (tree) {
    p.has_bias = problem.spec.bias_per_sequence = problem.spec.bias_per_query = true;
    problem.spec.bias_per_head = false;
    problem.spec.bias_dtype = DType::kBit;
  }
  // Slopes for each of zero sequences cannot be told from no slopes.
  if (p.batch == 0 && problem.spec.alibi_per_sequence) p.has_alibi = false;
  problem.owned = MakeAttention(problem.spec, seed);
  problem.request = ToRequest(problem.spec, problem.owned);
  if (tree) BiasToTree(seed, problem.owned.attention, &problem.request);
  problem.request.set_request_id("random-" + std::to_string(seed));
  return problem;
}

WireProblem PlainWireProblem(uint64_t seed, int64_t length, int64_t dim, DType dtype) {
  WireProblem problem;
  problem.spec = MakeSpec(1, 2, 2, length, length, dim, dim, dtype);
  problem.owned = MakeAttention(problem.spec, seed);
  problem.request = ToRequest(problem.spec, problem.owned);
  problem.request.set_request_id("plain-" + std::to_string(seed));
  return problem;
}

std::string Judge(WireProblem& problem, const v1::AttendResponse& response) {
  const Attention& a = problem.owned.attention;
  const Problem& p = a.problem;
  const Order order = OrderOf(problem.spec);
  const int64_t rows = p.packed ? p.total_q : p.len_q;
  v1::Tensor expected;
  SetShape(order, p.batch, p.heads_q, rows, p.dim_v, &expected);
  if (!std::ranges::equal(expected.shape(), response.o().shape())) return "shape of o";
  if (response.o().dtype() != static_cast<v1::DType>(p.o_dtype())) return "dtype of o";
  if (response.raw_size() != (p.return_lse ? 2 : 1)) return "number of raw entries";
  if (response.has_lse() != p.return_lse) return "presence of lse";
  const int64_t row_bytes = p.dim_v * DTypeBytes(p.o_dtype());
  const int64_t o_rows = (p.packed ? 1 : p.batch) * p.heads_q * rows;
  const std::string& o = response.raw(0);
  if (static_cast<int64_t>(o.size()) != o_rows * row_bytes) return "bytes of o";
  if (response.o().byte_length() != o.size()) return "byte_length of o";

  problem.owned.ResetOutput();
  size_t at = 0;
  ForRows(order, p.batch, p.heads_q, rows, [&](int64_t b, int64_t h, int64_t l) {
    const int64_t to = b * a.o.stride_b + h * a.o.stride_h + l * a.o.stride_l;
    std::memcpy(static_cast<char*>(a.o.data) + to * DTypeBytes(p.o_dtype()), o.data() + at,
                static_cast<size_t>(row_bytes));
    at += static_cast<size_t>(row_bytes);
  });
  if (p.return_lse) {
    const std::string& lse = response.raw(1);
    if (static_cast<int64_t>(lse.size()) != o_rows * 4) return "bytes of lse";
    const auto* values = reinterpret_cast<const char*>(lse.data());
    for (int64_t b = 0; b < (p.packed ? 1 : p.batch); ++b) {
      for (int64_t h = 0; h < p.heads_q; ++h) {
        std::memcpy(a.lse + b * a.lse_stride_b + h * a.lse_stride_h,
                    values + (b * p.heads_q + h) * rows * 4, static_cast<size_t>(rows) * 4);
      }
    }
  }
  const RowsReport report = CheckAllRows(a);
  return report.ok ? "" : report.detail;
}

std::string Shuffled(const std::string& message, std::mt19937_64& random) {
  // The generated class writes fields in order; its unknown fields preserve any order.
  google::protobuf::UnknownFieldSet fields;
  fields.ParseFromString(message);
  std::vector<int> order(static_cast<size_t>(fields.field_count()));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::shuffle(order.begin(), order.end(), random);
  // Elements of one field keep their order.
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t j = i + 1; j < order.size(); ++j) {
      if (fields.field(order[i]).number() == fields.field(order[j]).number() &&
          order[i] > order[j]) {
        std::swap(order[i], order[j]);
      }
    }
  }
  std::string shuffled;
  for (const int i : order) {
    google::protobuf::UnknownFieldSet one;
    one.AddField(fields.field(i));
    std::string bytes;
    one.SerializeToString(&bytes);
    shuffled += bytes;
  }
  return shuffled;
}

void Pieces::Add(std::string_view bytes) { memory_.emplace_back(bytes.begin(), bytes.end()); }

Pieces::Pieces(std::string_view bytes) {
  Add(bytes);
  spans_.emplace_back(memory_.front());
}

Pieces::Pieces(std::string_view bytes, std::mt19937_64& random) {
  const size_t longest = 1 + random() % (bytes.size() + 1);
  while (!bytes.empty()) {
    const size_t step = std::min<size_t>(random() % (longest + 1), bytes.size());
    Add(bytes.substr(0, step));
    bytes.remove_prefix(step);
  }
  for (const std::vector<uint8_t>& piece : memory_) spans_.emplace_back(piece);
}

}  // namespace attend::test

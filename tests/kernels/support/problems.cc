// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/problems.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

namespace attend::test {
namespace {

constexpr int kUnreadable = 0xff;  // NaN in every dtype
constexpr int64_t kAlignment = 64;

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A stream of values that depends on (seed, tensor) alone. Normal() is a sum of four uniforms:
// close to normal, and quick enough to fill benchmarks with.
class Values {
 public:
  Values(uint64_t seed, uint64_t tensor) : state_(Mix(seed ^ Mix(tensor))) {}

  float Normal() {
    const uint64_t bits = Mix(state_++);
    const int64_t sum = static_cast<int64_t>(bits & 0xffff) + static_cast<int64_t>(bits >> 48) +
                        static_cast<int64_t>((bits >> 16) & 0xffff) +
                        static_cast<int64_t>((bits >> 32) & 0xffff);
    return static_cast<float>(static_cast<double>(sum - 2 * 0xffff) * (std::sqrt(3.0) / 65536));
  }

  double Uniform() { return static_cast<double>(Mix(state_++) >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

struct Strides {
  int64_t b = 0;
  int64_t h = 0;
  int64_t l = 0;
  int64_t elements = 0;
};

Strides Place(Layout layout, bool packed, int64_t batch, int64_t heads, int64_t rows, int64_t dim) {
  const int64_t gap = layout == Layout::kStrided ? 3 : 0;
  Strides s;
  if (packed || layout == Layout::kBLHD) {
    s.h = dim + gap;
    s.l = heads * s.h + gap;
    s.b = packed ? 0 : rows * s.l + gap;
    s.elements = (packed ? 1 : batch) * (rows * s.l + gap);
  } else {
    s.l = dim + gap;
    s.h = rows * s.l + gap;
    s.b = heads * s.h + 2 * gap;
    s.elements = batch * s.b;
  }
  return s;
}

// Hands out places in a block that is allocated afterwards.
class Cursor {
 public:
  int64_t Take(int64_t bytes, int64_t shift = 0) {
    const int64_t begin = (end_ + kAlignment + kAlignment - 1) / kAlignment * kAlignment + shift;
    end_ = begin + bytes;
    return begin;
  }
  int64_t bytes() const { return end_ + kAlignment; }

 private:
  int64_t end_ = 0;
};

int64_t Max(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

Problem Complete(const ProblemSpec& spec) {
  Problem p = spec.problem;
  if (p.has_bias) SetBias(spec.bias_dtype, &p);
  if (p.packed) {
    p.batch = static_cast<int64_t>(spec.q_lengths.size());
    p.len_q = Max(spec.q_lengths);
    p.len_k = Max(spec.kv_lengths);
    p.total_q = Sum(spec.q_lengths);
    p.total_k = Sum(spec.kv_lengths);
  }
  return p;
}

// Writes the row at `base`; all other bytes stay NaN.
void FillRow(const ConstTensorView& view, DType dtype, int64_t base, int64_t dim, double magnitude,
             Values* values) {
  for (int64_t d = 0; d < dim; ++d) {
    StoreElement(const_cast<void*>(view.data), dtype, base + d,
                 static_cast<float>(magnitude * values->Normal()));
  }
}

int64_t QueryElement(const Attention& a, const Sequence& s, int64_t b, int64_t h, int64_t i) {
  return b * a.q.stride_b + h * a.q.stride_h + (s.q_row + i) * a.q.stride_l;
}

void FillTensors(const ProblemSpec& spec, const Attention& a, uint64_t seed) {
  const Problem& p = a.problem;
  Values q(seed, 1), k(seed, 2), v(seed, 3);
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      for (int64_t i = 0; i < s.q_len; ++i) {
        FillRow(a.q, p.dtype, QueryElement(a, s, b, h, i), p.dim, spec.magnitude_q, &q);
      }
    }
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t j = 0; j < s.k_len; ++j) {
        FillRow(a.k, p.dtype, KeyElement(a, a.k, s, b, h, j), p.dim, 1, &k);
        FillRow(a.v, p.dtype, KeyElement(a, a.v, s, b, h, j), p.dim_v, 1, &v);
      }
    }
  }
}

void SetBit(uint8_t* bits, int64_t at, bool value) {
  const auto bit = static_cast<uint8_t>(1 << at % 8);
  bits[at / 8] = static_cast<uint8_t>(value ? bits[at / 8] | bit : bits[at / 8] & ~bit);
}

void FillBias(const ProblemSpec& spec, const Attention& a, uint64_t seed) {
  const Problem& p = a.problem;
  Values values(seed, 4);
  for (int64_t b = 0; b < (spec.bias_per_sequence ? p.batch : 1); ++b) {
    // Elements that no sequence of this bias row may read stay NaN.
    int64_t q_len = 0, k_len = 0;
    for (int64_t other = 0; other < p.batch; ++other) {
      if (spec.bias_per_sequence && other != b) continue;
      q_len = std::max(q_len, SequenceOf(a, other).q_len);
      k_len = std::max(k_len, SequenceOf(a, other).k_len);
    }
    if (!spec.bias_per_query) q_len = 1;
    for (int64_t h = 0; h < (spec.bias_per_head ? p.heads_q : 1); ++h) {
      for (int64_t i = 0; i < q_len; ++i) {
        for (int64_t j = 0; j < k_len; ++j) {
          const float value = values.Normal();
          const bool masked = values.Uniform() < spec.bias_masked_share;
          const int64_t at = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q + j;
          void* const data = const_cast<void*>(a.bias.data);
          if (a.bias.dtype == DType::kBit) {
            SetBit(static_cast<uint8_t*>(data), at, !masked);
          } else {
            StoreElement(data, a.bias.dtype, at,
                         masked ? -std::numeric_limits<float>::infinity() : value);
          }
        }
      }
    }
  }
}

// One page among the others belongs to no sequence.
struct Pages {
  int64_t stride = 0;  // of the table
  int64_t count = 0;
};
Pages CountPages(const Problem& p) {
  const int64_t stride = p.page_rows == 0 ? 0 : (p.len_k + p.page_rows - 1) / p.page_rows;
  return {stride, p.batch * stride + 1};
}

void FillPageTable(PageOrder order, Attention* a, std::byte* place, uint64_t seed) {
  const Problem& p = a->problem;
  if (p.page_rows == 0) return;
  const Pages pages = CountPages(p);
  std::vector<int32_t> numbers(static_cast<size_t>(pages.count));
  std::iota(numbers.begin(), numbers.end(), 0);
  if (order == PageOrder::kDescending) {
    std::reverse(numbers.begin(), numbers.end());
  } else {
    std::shuffle(numbers.begin(), numbers.end(), std::mt19937_64(seed));
  }
  for (int64_t b = 1; b < p.batch && order == PageOrder::kShared; ++b) {
    std::copy_n(numbers.begin(), (pages.stride + 1) / 2, numbers.begin() + b * pages.stride);
  }
  std::memcpy(place, numbers.data(), static_cast<size_t>(p.batch * pages.stride) * 4);
  a->kv_pages = {reinterpret_cast<const int32_t*>(place), pages.stride};
}

struct Places {
  int64_t kv_pages;
  int64_t q, k, v, o, lse, bias, alibi, sinks, q_lengths, kv_lengths, q_offsets, kv_offsets;
};

void PlaceBias(const ProblemSpec& spec, Attention* a, Cursor* cursor, Places* at) {
  const Problem& p = a->problem;
  if (!p.has_bias) return;
  int64_t row = p.len_k + (spec.layout == Layout::kStrided ? 5 : 0);
  if (spec.bias_dtype == DType::kBit) row = (row + 7) / 8 * 8;
  const int64_t rows = spec.bias_per_query ? p.len_q : 1;
  const int64_t heads = spec.bias_per_head ? p.heads_q : 1;
  const int64_t batch = spec.bias_per_sequence ? p.batch : 1;
  a->bias.dtype = spec.bias_dtype;
  a->bias.stride_q = spec.bias_per_query ? row : 0;
  a->bias.stride_h = spec.bias_per_head ? rows * row : 0;
  a->bias.stride_b = spec.bias_per_sequence ? heads * rows * row : 0;
  at->bias = cursor->Take(RowBytes(spec.bias_dtype, batch * heads * rows * row));
}

void PlaceInputs(const ProblemSpec& spec, Attention* a, Cursor* cursor, Places* at) {
  const Problem& p = a->problem;
  const int64_t size = DTypeBytes(p.dtype);
  const int64_t shift = spec.misaligned_elements * size;
  const int64_t rows_q = p.packed ? p.total_q : p.len_q;
  const int64_t rows_k = p.packed ? p.total_k : p.len_k;
  const auto place = [&](ConstTensorView* view, int64_t batch, int64_t heads, int64_t rows,
                         int64_t dim) {
    const Strides s = Place(spec.layout, p.packed, batch, heads, rows, dim);
    view->stride_b = s.b;
    view->stride_h = s.h;
    view->stride_l = s.l;
    return cursor->Take(s.elements * size, shift);
  };
  at->q = place(&a->q, p.batch, p.heads_q, rows_q, p.dim);
  const Pages pages = CountPages(p);
  const bool paged = p.page_rows > 0;
  const int64_t key_batch = paged ? pages.count : p.batch;
  const int64_t key_rows = paged ? p.page_rows : rows_k;
  at->k = place(&a->k, key_batch, p.heads_kv, key_rows, p.dim);
  at->v = place(&a->v, key_batch, p.heads_kv, key_rows, p.dim_v);
  at->kv_pages = cursor->Take(p.batch * pages.stride * 4);
  PlaceBias(spec, a, cursor, at);
  a->alibi_stride_b = spec.alibi_per_sequence ? p.heads_q : 0;
  at->alibi = cursor->Take((spec.alibi_per_sequence ? p.batch : 1) * p.heads_q * 4);
  at->sinks = cursor->Take(p.heads_q * 4);
  at->q_lengths = cursor->Take((p.batch + 1) * 8);
  at->kv_lengths = cursor->Take((p.batch + 1) * 8);
}

void PlaceOutputs(const ProblemSpec& spec, Attention* a, Cursor* cursor, Places* at) {
  const Problem& p = a->problem;
  const int64_t rows = p.packed ? p.total_q : p.len_q;
  const Strides s = Place(spec.layout, p.packed, p.batch, p.heads_q, rows, p.dim_v);
  a->o.stride_b = s.b;
  a->o.stride_h = s.h;
  a->o.stride_l = s.l;
  const int64_t size = DTypeBytes(p.o_dtype());
  at->o = cursor->Take(s.elements * size, spec.misaligned_elements * size);
  a->lse_stride_h = rows + (spec.layout == Layout::kStrided ? 1 : 0);
  a->lse_stride_b = p.packed ? 0 : p.heads_q * a->lse_stride_h;
  at->lse = cursor->Take((p.packed ? 1 : p.batch) * p.heads_q * a->lse_stride_h * 4);
}

// Lengths as they are (dense) or cumulated (packed).
const int64_t* StoreLengths(std::byte* place, const std::vector<int64_t>& lengths, bool packed) {
  if (lengths.empty() && !packed) return nullptr;
  int64_t* out = reinterpret_cast<int64_t*>(place);
  int64_t sum = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    out[b] = packed ? sum : lengths[b];
    sum += lengths[b];
  }
  if (packed) out[lengths.size()] = sum;
  return out;
}

void FillPerHead(const ProblemSpec& spec, Attention* a, std::byte* in, const Places& at,
                 uint64_t seed) {
  const Problem& p = a->problem;
  Values values(seed, 5);
  if (p.has_alibi) {
    float* slopes = reinterpret_cast<float*>(in + at.alibi);
    const int64_t count = (spec.alibi_per_sequence ? p.batch : 1) * p.heads_q;
    for (int64_t n = 0; n < count; ++n) slopes[n] = static_cast<float>(values.Uniform());
    a->alibi_slopes = slopes;
  }
  if (p.has_sinks) {
    float* sinks = reinterpret_cast<float*>(in + at.sinks);
    for (int64_t h = 0; h < p.heads_q; ++h) sinks[h] = 2 * values.Normal();
    a->sinks = sinks;
  }
}

}  // namespace

void AlignedFree::operator()(std::byte* data) const { std::free(data); }

Block MakeBlock(int64_t bytes) {
  const size_t rounded = (static_cast<size_t>(bytes) + 256) / 256 * 256;
  void* data = std::aligned_alloc(256, rounded);
  if (data == nullptr) std::abort();
  return Block(static_cast<std::byte*>(data));
}

ProblemSpec MakeSpec(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t len_q, int64_t len_k,
                     int64_t dim, int64_t dim_v, DType dtype) {
  ProblemSpec spec;
  Problem& p = spec.problem;
  p.dtype = dtype;
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.len_q = len_q;
  p.len_k = len_k;
  p.dim = dim;
  p.dim_v = dim_v;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(dim)));
  p.return_lse = true;
  return spec;
}

OwnedAttention MakeAttention(const ProblemSpec& spec, uint64_t seed) {
  OwnedAttention owned;
  Attention& a = owned.attention;
  a.problem = Complete(spec);
  Places at{};
  Cursor in_cursor, out_cursor;
  PlaceInputs(spec, &a, &in_cursor, &at);
  PlaceOutputs(spec, &a, &out_cursor, &at);
  owned.input_block = MakeBlock(in_cursor.bytes());
  owned.output_block = MakeBlock(out_cursor.bytes());
  std::byte* in = owned.input_block.get();
  std::byte* out = owned.output_block.get();
  owned.input = {in, in_cursor.bytes()};
  owned.output = {out, out_cursor.bytes()};
  std::memset(in, kUnreadable, static_cast<size_t>(owned.input.bytes));

  const bool packed = a.problem.packed;
  const int64_t* q_lengths = StoreLengths(in + at.q_lengths, spec.q_lengths, packed);
  const int64_t* kv_lengths = StoreLengths(in + at.kv_lengths, spec.kv_lengths, packed);
  (packed ? a.q_offsets : a.q_lengths) = q_lengths;
  (packed ? a.kv_offsets : a.kv_lengths) = kv_lengths;
  FillPageTable(spec.page_order, &a, in + at.kv_pages, seed);
  a.q.data = in + at.q;
  a.k.data = in + at.k;
  a.v.data = in + at.v;
  a.o.data = out + at.o;
  if (a.problem.return_lse) a.lse = reinterpret_cast<float*>(out + at.lse);
  FillTensors(spec, a, seed);
  if (a.problem.has_bias) {
    a.bias.data = in + at.bias;
    FillBias(spec, a, seed);
  }
  FillPerHead(spec, &a, in, at, seed);
  a.dropout = spec.dropout;
  owned.ResetOutput();
  return owned;
}

void Set(const Attention& attention, void* element, float value) {
  StoreElement(element, attention.problem.dtype, 0, value);
}

float Get(const Attention& attention, const void* element) {
  return LoadElement(element, attention.problem.dtype, 0);
}

uint64_t FreshSeed() {
  if (const char* seed = std::getenv("ATTEND_TEST_SEED")) return std::strtoull(seed, nullptr, 0);
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace attend::test

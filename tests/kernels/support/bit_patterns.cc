// SPDX-License-Identifier: Apache-2.0

#include "tests/kernels/support/bit_patterns.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>

namespace attend::test {
namespace {

constexpr double kMost = std::numeric_limits<float>::max();

enum class Kind { kNan, kInfinity, kSubnormal, kMost, kHuge, kZero, kAny };
constexpr int kKinds = 7;

class Spoiler {
 public:
  explicit Spoiler(uint64_t seed) : random_(seed) {
    // Half of the problems are finite, so that NaN does not hide everything else.
    kinds_ = Chance(0.5) ? 0b0111100 : static_cast<uint32_t>(Range(1, (1 << kKinds) - 1));
    if (Chance(0.2)) kinds_ = 0b0000001;
  }

  void Spoil(OwnedAttention* owned) {
    const Attention& a = owned->attention;
    const Problem& p = a.problem;
    const std::array<double, 3> shares{Share(), Share(), Share()};
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = SequenceOf(a, b);
      for (int64_t h = 0; h < p.heads_q; ++h) {
        SpoilRows(p.dtype, s.q_len, p.dim, shares[0],
                  [&](int64_t i, int64_t d) { return owned->Q(b, h, i, d); });
      }
      for (int64_t h = 0; h < p.heads_kv; ++h) {
        SpoilRows(p.dtype, s.k_len, p.dim, shares[1],
                  [&](int64_t j, int64_t d) { return owned->K(b, h, j, d); });
        SpoilRows(p.dtype, s.k_len, p.dim_v, shares[2],
                  [&](int64_t j, int64_t d) { return owned->V(b, h, j, d); });
      }
    }
    if (p.has_bias && p.batch > 0) SpoilBias(a);
    const double share = Share();
    for (int64_t h = 0; h < p.heads_q; ++h) {
      if (p.has_sinks && Chance(share)) Write(DType::kFloat32, const_cast<float*>(a.sinks + h));
    }
    const int64_t sets = a.alibi_stride_b == 0 ? 1 : p.batch;
    for (int64_t n = 0; p.has_alibi && n < sets * p.heads_q; ++n) {
      if (Chance(share)) Write(DType::kFloat32, const_cast<float*>(a.alibi_slopes + n));
    }
  }

 private:
  int64_t Range(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }
  double Share() {
    constexpr double kShares[] = {0, 0, 0, 0.0003, 0.003, 0.1};
    return kShares[Range(0, 5)];
  }

  // The gaps between spoilt elements are drawn: most rows have none.
  template <class At>
  void SpoilRows(DType dtype, int64_t rows, int64_t dim, double share, const At& at) {
    if (share == 0) return;
    std::geometric_distribution<int64_t> gap(share);
    for (int64_t n = gap(random_); n < rows * dim; n += 1 + gap(random_)) {
      Write(dtype, at(n / dim, n % dim));
    }
  }

  void Write(DType dtype, void* element) {
    const int mantissa = dtype == DType::kFloat16 ? 10 : dtype == DType::kBFloat16 ? 7 : 23;
    const int width = dtype == DType::kFloat32 ? 32 : 16;
    const uint32_t sign = Chance(0.5) ? 1u << (width - 1) : 0;
    const uint32_t exponents = (1u << (width - 1)) - (1u << mantissa);  // all their bits
    const auto fraction = static_cast<uint32_t>(Range(1, (int64_t{1} << mantissa) - 1));
    const uint32_t largest = exponents - (1u << mantissa);
    uint32_t bits = 0;
    switch (DrawKind()) {
      case Kind::kNan:
        bits = sign | exponents | (Chance(0.3) ? (1u << mantissa) - 1 : fraction);
        break;
      case Kind::kInfinity:
        bits = sign | exponents;
        break;
      case Kind::kSubnormal:
        bits = sign | fraction;
        break;
      case Kind::kMost:
        bits = sign | largest | ((1u << mantissa) - 1);
        break;
      case Kind::kHuge:
        bits = sign | (largest - (static_cast<uint32_t>(Range(0, 3)) << mantissa)) | fraction;
        break;
      case Kind::kZero:
        bits = sign;
        break;
      case Kind::kAny:
        bits = static_cast<uint32_t>(random_());
        break;
    }
    if (width == 32) {
      *static_cast<uint32_t*>(element) = bits;
    } else {
      *static_cast<uint16_t*>(element) = static_cast<uint16_t>(bits);
    }
  }

  Kind DrawKind() {
    for (;;) {
      const int64_t kind = Range(0, kKinds - 1);
      if ((kinds_ >> kind & 1) != 0) return static_cast<Kind>(kind);
    }
  }

  // Typical masks: padding on one side, whole rows, scattered keys.
  void SpoilBias(const Attention& a) {
    const Problem& p = a.problem;
    if (a.bias.dtype == DType::kBit) return;  // every pattern is drawn as it is
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    const float low = a.bias.dtype == DType::kFloat16    ? -65504.0f
                      : a.bias.dtype == DType::kBFloat16 ? -0x1.fep127f
                                                         : kLowest;
    const float masks[] = {-HUGE_VALF, low, low, -1e4f, -1e9f, -1e10f, -3e38f, 3e38f, -low};
    constexpr int64_t kPads[] = {1, 15, 63, 64, 65, 128, 200, 1000};
    const float mask = masks[Range(0, 8)];
    const int64_t pad = kPads[Range(0, 7)];
    const int64_t shape = Range(0, 4);  // the last: none
    const double share = Share();
    for (int64_t b = 0; b < (a.bias.stride_b == 0 ? 1 : p.batch); ++b) {
      for (int64_t h = 0; h < (a.bias.stride_h == 0 ? 1 : p.heads_q); ++h) {
        for (int64_t i = 0; i < (a.bias.stride_q == 0 ? 1 : p.len_q); ++i) {
          const int64_t row = b * a.bias.stride_b + h * a.bias.stride_h + i * a.bias.stride_q;
          const bool whole = shape == 2 && Chance(0.5);
          for (int64_t j = 0; j < p.len_k; ++j) {
            void* at = static_cast<char*>(const_cast<void*>(a.bias.data)) +
                       (row + j) * DTypeBytes(a.bias.dtype);
            const bool masked = whole || (shape == 0 && j < pad) ||
                                (shape == 1 && j >= p.len_k - pad) || (shape == 3 && Chance(0.5));
            if (masked) StoreElement(at, a.bias.dtype, 0, mask);
            if (share > 0 && Chance(share)) Write(a.bias.dtype, at);
          }
        }
      }
    }
  }

  std::mt19937_64 random_;
  uint32_t kinds_;  // bit n: Kind n
};

}  // namespace

void SpoilBits(OwnedAttention* owned, uint64_t seed) { Spoiler(seed).Spoil(owned); }

void SpreadMagnitudes(OwnedAttention* owned, uint64_t seed) {
  const Attention& a = owned->attention;
  const Problem& p = a.problem;
  std::mt19937_64 random(seed);
  const bool half = p.dtype == DType::kFloat16;
  std::uniform_real_distribution<double> exponent(half ? -24 : -149, half ? 16 : 128);
  const auto fill = [&](int64_t rows, int64_t dim, const auto& at) {
    for (int64_t n = 0; n < rows * dim; ++n) {
      const double value = std::min(std::exp2(exponent(random)), half ? 65504 : kMost);
      Set(a, at(n / dim, n % dim), static_cast<float>(random() % 2 == 0 ? value : -value));
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = SequenceOf(a, b);
    for (int64_t h = 0; h < p.heads_q; ++h) {
      fill(s.q_len, p.dim, [&](int64_t i, int64_t d) { return owned->Q(b, h, i, d); });
    }
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      fill(s.k_len, p.dim, [&](int64_t j, int64_t d) { return owned->K(b, h, j, d); });
      fill(s.k_len, p.dim_v, [&](int64_t j, int64_t d) { return owned->V(b, h, j, d); });
    }
  }
}

ProblemSpec BitPatternSpec(uint64_t seed, double work_max) {
  ProblemSpec spec = RandomSpec(seed, work_max);
  std::mt19937_64 random(seed);
  constexpr float kScales[] = {0.0f, 1e-40f, -1e-20f, 1e5f, 1e20f, -3e38f, 3.4e38f};
  if (random() % 6 == 0) spec.problem.scale = kScales[random() % 7];
  spec.problem.return_lse = random() % 8 != 0;
  return spec;
}

}  // namespace attend::test

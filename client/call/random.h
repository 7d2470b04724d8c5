// SPDX-License-Identifier: Apache-2.0
//
// A small seeded generator (xoshiro256++, Blackman and Vigna 2018; seeded through splitmix64). The
// same seed gives the same numbers on every machine, which std:: distributions do not guarantee.
// Not thread-safe.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>

namespace attend::client {

inline uint64_t SplitMix64(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A fresh seed from the system.
inline uint64_t SystemSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) word = SplitMix64(&seed);
  }

  uint64_t Bits() {
    const uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

  // In [0, 1).
  double Uniform() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }

  // In [0, n), n > 0.
  int64_t Below(int64_t n) { return static_cast<int64_t>(Uniform() * static_cast<double>(n)); }

  // Exponential with mean 1.
  double Exponential() { return -std::log1p(-Uniform()); }

  // Approximately normal, mean 0 and variance 1: the sum of four uniform 16-bit draws, cheap enough
  // to fill tensors with.
  float AboutNormal() {
    const uint64_t bits = Bits();
    const int64_t sum = static_cast<int64_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                             ((bits >> 32) & 0xffff) + (bits >> 48));
    // Four uniforms on [0, 65536) have variance 4 * 65536^2 / 12.
    return static_cast<float>(sum - 2 * 65535) * (1.7320508f / 65536.0f);
  }

 private:
  uint64_t state_[4];
};

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// Deterministic sampling by number: a number is in a sample or not, however often it is checked.
// Pure.

#pragma once

#include <cstdint>

namespace attend {

// SplitMix64 (Steele, Lea & Flood 2014): a bijection with well-mixed bits.
constexpr uint64_t Mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// Whether the number is in the sample with this share of all numbers.
constexpr bool InSample(uint64_t seed, uint64_t number, double share) {
  if (share <= 0) return false;
  return static_cast<double>(Mix(seed ^ Mix(number)) >> 11) * 0x1p-53 < share;
}

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// A fresh seed for every run of a test, told when it fails.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace attend::client {

inline uint64_t FreshSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace attend::client

// Declares `seed` and shows it with every failure that follows.
#define ATTEND_FRESH_SEED(seed)                        \
  const uint64_t seed = ::attend::client::FreshSeed(); \
  SCOPED_TRACE(::testing::Message() << "seed " << seed)

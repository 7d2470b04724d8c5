// SPDX-License-Identifier: Apache-2.0
//
// The tile unit in plain C++: what tile_unit.h says of a product, element by element.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "kernels/cpu/flash.h"
#include "kernels/cpu/flash_tile.h"
#include "kernels/cpu/tile_unit.h"
#include "tests/kernels/support/problems.h"

namespace attend::test {

const cpu_flash::TileUnit& TwinTileUnit();
// Whether it runs here: on x86 it is compiled for AVX2 and FMA.
bool TwinRuns();

// Replaces the machine's tile unit by the twin while this lives.
class WithTwinTiles {
 public:
  WithTwinTiles() { cpu_flash::UseTileUnitForTest(&TwinTileUnit()); }
  ~WithTwinTiles() { cpu_flash::UseTileUnitForTest(nullptr); }
};

// Runs cpu_flash_amx on the twin. Failures name the seed.
class AmxTest : public testing::Test {
 protected:
  void SetUp() override {
    if (cpu_flash::ChooseAmxTileFunction() == nullptr || !cpu_flash::HasBf16Pairs()) {
      GTEST_SKIP() << "no AVX-512 with AVX512_BF16";
    }
  }

  const uint64_t seed_ = FreshSeed();
  const WithTwinTiles twin_;
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    "ATTEND_TEST_SEED=" + std::to_string(seed_)};
};

}  // namespace attend::test

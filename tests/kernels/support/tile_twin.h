// SPDX-License-Identifier: Apache-2.0
//
// The tile unit in plain C++: what tile_unit.h says of a product, element by element.

#pragma once

#include "kernels/cpu/tile_unit.h"

namespace attend::test {

const cpu_flash::TileUnit& TwinTileUnit();
// Whether it runs here: on x86 it is compiled for AVX2 and FMA.
bool TwinRuns();

// The twin in the machine's place while this lives.
class WithTwinTiles {
 public:
  WithTwinTiles() { cpu_flash::UseTileUnitForTest(&TwinTileUnit()); }
  ~WithTwinTiles() { cpu_flash::UseTileUnitForTest(nullptr); }
};

}  // namespace attend::test

// SPDX-License-Identifier: Apache-2.0
//
// The tile unit of cpu_flash_amx (AMX: TDPBF16PS on tiles of 16 rows by 64 bytes), behind an
// interface that tests implement too. A product adds 32 terms of an element at a time, as Intel's
// manual says: those at even places in one chain of fused multiply-adds, those at odd places in
// another, both from 0, then the sum of the two chains, then that to the element so far. All
// roundings are to nearest even. Subnormal inputs, sums and products count as 0; NaN and Inf follow
// IEEE. MXCSR has no effect.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace attend::cpu_flash {

struct TileUnit {
  // Each thread brackets its products with these.
  void (*begin)();
  void (*end)();
  // C = A B for 32 rows of A and `columns` times 16 columns of B (1 or 2). A is bf16, `a_bytes`
  // from row to row. B has rows of pairs: element 2 n and 2 n + 1 of all columns, column after
  // column. The sum is over 32 `steps` elements. C is fp32; B and C have no gaps between rows.
  void (*multiply)(const void* a, int64_t a_bytes, const void* b, int64_t steps, int columns,
                   float* c);
};

// The machine's; it may be used if WhyNoAmx() is "".
const TileUnit& MachineTileUnit();

// The unit in use: the machine's, or that of a test. Null: the machine's again.
const TileUnit& CurrentTileUnit();
void UseTileUnitForTest(const TileUnit* unit);

// Decides whether there is a tile unit for this process.
struct AmxFacts {
  bool cpu = false;        // CPUID: AMX-TILE, AMX-BF16, and AVX512_BF16 for the softmax
  bool vectors = false;    // Highway uses AVX-512 here: it may lack a target or part of the set
  bool state = false;      // XCR0: the system saves tiles
  bool permitted = false;  // arch_prctl(ARCH_REQ_XCOMP_PERM) has let this process have tile data
};
// "" if there is, else the reason. Static storage.
std::string_view WhyNoAmx(const AmxFacts& facts);
// The same for this process, for which it asks once. The permission is the process's: its threads'
// alternate signal stacks must then have room for tiles.
std::string_view WhyNoAmx();
// For the CPU's description: ", AMX", or why not, or nothing without such a CPU.
std::string AmxText(const AmxFacts& facts);
std::string AmxText();

}  // namespace attend::cpu_flash

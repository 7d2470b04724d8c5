// SPDX-License-Identifier: Apache-2.0
//
// Tiles in assembly, as compilers' own intrinsics for them are, so that this file needs no options.

#include "kernels/cpu/tile_unit.h"

#include <atomic>

#include "kernels/cpu/flash_tile.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define ATTEND_HAVE_TILES 1
#else
#define ATTEND_HAVE_TILES 0
#endif

namespace attend::cpu_flash {
namespace {

#if ATTEND_HAVE_TILES

// All eight tiles have 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

void Begin() {
  static constexpr TileConfig kConfig;
  asm volatile("ldtilecfg %0" : : "m"(kConfig));
}

void End() { asm volatile("tilerelease"); }

// Tiles 0 and 1 have rows of A, 2 and 3 columns of B, 4 to 7 the products.
#define ATTEND_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)
#define ATTEND_LOAD(tile, from, bytes) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"(bytes) : "memory")
#define ATTEND_STORE(tile, to, bytes) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"(bytes) : "memory")
#define ATTEND_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

void MultiplyOne(const char* a, int64_t a_bytes, const char* b, int64_t steps, float* c) {
  ATTEND_ZERO(4);
  ATTEND_ZERO(6);
  for (int64_t n = 0; n < steps; ++n) {
    ATTEND_LOAD(2, b, kTileBytes);
    ATTEND_LOAD(0, a, a_bytes);
    ATTEND_LOAD(1, a + kTileRows * a_bytes, a_bytes);
    ATTEND_MULTIPLY(4, 0, 2);
    ATTEND_MULTIPLY(6, 1, 2);
    a += kTileBytes;
    b += kTileRows * kTileBytes;
  }
  ATTEND_STORE(4, c, kTileBytes);
  ATTEND_STORE(6, c + kTileRows * 16, kTileBytes);
}

void MultiplyTwo(const char* a, int64_t a_bytes, const char* b, int64_t steps, float* c) {
  constexpr int64_t kRowBytes = 2 * kTileBytes;  // of B and C
  ATTEND_ZERO(4);
  ATTEND_ZERO(5);
  ATTEND_ZERO(6);
  ATTEND_ZERO(7);
  for (int64_t n = 0; n < steps; ++n) {
    ATTEND_LOAD(2, b, kRowBytes);
    ATTEND_LOAD(0, a, a_bytes);
    ATTEND_LOAD(3, b + kTileBytes, kRowBytes);
    ATTEND_MULTIPLY(4, 0, 2);
    ATTEND_LOAD(1, a + kTileRows * a_bytes, a_bytes);
    ATTEND_MULTIPLY(5, 0, 3);
    ATTEND_MULTIPLY(6, 1, 2);
    ATTEND_MULTIPLY(7, 1, 3);
    a += kTileBytes;
    b += kTileRows * kRowBytes;
  }
  ATTEND_STORE(4, c, kRowBytes);
  ATTEND_STORE(5, c + 16, kRowBytes);
  ATTEND_STORE(6, c + kTileRows * 32, kRowBytes);
  ATTEND_STORE(7, c + kTileRows * 32 + 16, kRowBytes);
}

#undef ATTEND_ZERO
#undef ATTEND_LOAD
#undef ATTEND_STORE
#undef ATTEND_MULTIPLY

void Multiply(const void* a, int64_t a_bytes, const void* b, int64_t steps, int columns, float* c) {
  const auto multiply = columns == 1 ? MultiplyOne : MultiplyTwo;
  multiply(static_cast<const char*>(a), a_bytes, static_cast<const char*>(b), steps, c);
}

AmxFacts MachineFacts() {
  constexpr unsigned kTileBit = 1u << 24, kBf16Bit = 1u << 22;  // CPUID 7, EDX
  constexpr unsigned kXsaveBit = 1u << 27;                      // CPUID 1, ECX
  constexpr unsigned kTileState = 3u << 17;                     // XCR0: configuration and data
  constexpr long kRequest = 0x1023, kTileData = 18;             // ARCH_REQ_XCOMP_PERM
  AmxFacts facts;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool xsave = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & kXsaveBit) != 0;
  const bool leaf = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0;
  facts.cpu = leaf && (d & kTileBit) != 0 && (d & kBf16Bit) != 0 &&
              __builtin_cpu_supports("avx512bf16") != 0;
  facts.vectors = ChooseAmxTileFunction() != nullptr;
  if (!facts.cpu || !facts.vectors || !xsave) return facts;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  facts.state = (low & kTileState) == kTileState;
  // For all threads of the process. The kernel refuses it where a thread's alternate signal stack
  // is too small, and sandboxes refuse the call.
  facts.permitted = facts.state && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return facts;
}

#else

void Begin() {}
void End() {}
void Multiply(const void*, int64_t, const void*, int64_t, int, float*) {}
AmxFacts MachineFacts() { return {}; }

#endif

const AmxFacts& Facts() {
  static const AmxFacts facts = MachineFacts();
  return facts;
}

constexpr TileUnit kMachine{Begin, End, Multiply};
std::atomic<const TileUnit*> current{&kMachine};

}  // namespace

const TileUnit& MachineTileUnit() { return kMachine; }

const TileUnit& CurrentTileUnit() { return *current.load(std::memory_order_relaxed); }

void UseTileUnitForTest(const TileUnit* unit) { current.store(unit == nullptr ? &kMachine : unit); }

std::string_view WhyNoAmx(const AmxFacts& facts) {
  if (!facts.cpu) return "cpu_flash_amx needs a CPU with AMX-BF16 and AVX512_BF16";
  if (!facts.vectors) return "cpu_flash runs without AVX-512 here, which cpu_flash_amx needs";
  if (!facts.state) return "the system does not save AMX tiles (XCR0), which cpu_flash_amx needs";
  if (!facts.permitted) {
    return "the system refused AMX tile data (ARCH_REQ_XCOMP_PERM), which cpu_flash_amx needs";
  }
  return "";
}

std::string_view WhyNoAmx() { return WhyNoAmx(Facts()); }

std::string AmxText(const AmxFacts& facts) {
  if (!facts.cpu) return "";
  const std::string_view why = WhyNoAmx(facts);
  return why.empty() ? ", AMX" : " (" + std::string(why) + ")";
}

std::string AmxText() { return AmxText(Facts()); }

}  // namespace attend::cpu_flash

// SPDX-License-Identifier: Apache-2.0

#include "tests/server/support/own_allocations.h"

#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace attend::test {
namespace {

enum class Owner { kServer, kOther, kCaller };

struct Function {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  Owner owner = Owner::kCaller;
};

constexpr int kFramesMost = 64;

std::vector<Function> functions;  // of this program, by address
uintptr_t program_begin = 0;

bool Has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// By the first name in a mangled one.
Owner OwnerOf(std::string_view mangled) {
  const size_t at = mangled.find_first_of("123456789S", mangled.starts_with("_ZT") ? 6 : 2);
  if (!mangled.starts_with("_Z") || at == std::string_view::npos) return Owner::kCaller;
  const std::string_view name = mangled.substr(at);
  if (name.starts_with("4grpc") || name.starts_with("9grpc_core")) return Owner::kOther;
  if (name.starts_with("6attend4test")) {  // fake devices; operator new
    return Has(name, "4Fake") || Has(name, "9TestArena") ? Owner::kOther : Owner::kCaller;
  }
  for (const char* const assertion : {"Consistent", "AddUp", "AllInUse"}) {
    if (Has(name, assertion)) return Owner::kOther;
  }
  return name.starts_with("6attend") ? Owner::kServer : Owner::kCaller;
}

Owner OwnerOfLibrary(std::string_view path) {
  const bool grpc = Has(path, "libgrpc") || Has(path, "libgpr.") || Has(path, "libabsl");
  return grpc ? Owner::kOther : Owner::kCaller;
}

Owner OwnerOf(void* address) {
  Dl_info about = {};
  if (dladdr(address, &about) == 0) return Owner::kCaller;
  if (reinterpret_cast<uintptr_t>(about.dli_fbase) != program_begin) {
    return OwnerOfLibrary(about.dli_fname);
  }
  // inside the call, not the instruction after it
  const uintptr_t at = reinterpret_cast<uintptr_t>(address) - 1;
  auto found = std::upper_bound(functions.begin(), functions.end(), at,
                                [](uintptr_t a, const Function& b) { return a < b.begin; });
  if (found == functions.begin() || at >= (--found)->end) return Owner::kCaller;
  return found->owner;
}

}  // namespace

void LearnOwnCode() {
  if (!functions.empty()) return;
  Dl_info about = {};
  dladdr(reinterpret_cast<void*>(&LearnOwnCode), &about);
  program_begin = reinterpret_cast<uintptr_t>(about.dli_fbase);
  std::ifstream file("/proc/self/exe", std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  ElfW(Ehdr) head;
  std::memcpy(&head, image.data(), sizeof(head));
  const auto section = [&](size_t i) {
    ElfW(Shdr) one;
    std::memcpy(&one, image.data() + head.e_shoff + i * sizeof(one), sizeof(one));
    return one;
  };
  for (size_t i = 0; i < head.e_shnum; ++i) {
    const ElfW(Shdr) symbols = section(i);
    if (symbols.sh_type != SHT_SYMTAB) continue;
    const char* const names = image.data() + section(symbols.sh_link).sh_offset;
    for (size_t at = 0; at < symbols.sh_size; at += sizeof(ElfW(Sym))) {
      ElfW(Sym) symbol;
      std::memcpy(&symbol, image.data() + symbols.sh_offset + at, sizeof(symbol));
      if ((symbol.st_info & 0xf) != STT_FUNC || symbol.st_size == 0) continue;
      const uintptr_t begin = symbol.st_value + (head.e_type == ET_DYN ? program_begin : 0);
      functions.push_back({begin, begin + symbol.st_size, OwnerOf(names + symbol.st_name)});
    }
  }
  std::sort(functions.begin(), functions.end(),
            [](const Function& a, const Function& b) { return a.begin < b.begin; });
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads what backtrace needs
}

bool OfOwnCode() {
  // Called for every allocation, but a program has few call sites.
  thread_local std::unordered_map<void*, Owner> known;
  void* frames[kFramesMost];
  const int count = backtrace(frames, kFramesMost);
  for (int i = 0; i < count; ++i) {
    const auto [at, first] = known.try_emplace(frames[i]);
    if (first) at->second = OwnerOf(frames[i]);
    const Owner owner = at->second;
    if (owner != Owner::kCaller) return owner == Owner::kServer;
  }
  return false;
}

}  // namespace attend::test

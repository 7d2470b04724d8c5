// SPDX-License-Identifier: Apache-2.0
//
// Sessions that requests can name: "session-a" of 70 tokens and "session-b" of 3, each with a layer
// of 2 KV heads, D 4 and Dv 2 in fp16. Targets never commit appended rows, so that every input
// finds the sessions unchanged.

#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/fuzz/fuzz.h"
#include "tests/server/support/test_arena.h"

namespace attend::fuzz {

class TwoSessions {
 public:
  TwoSessions() {
    for (const int64_t rows : {70, 3}) {
      const auto created = table_.Create(0, {0, {{DType::kFloat16, 2, 4, 2}}});
      const CacheUse use{created->id, 0, 0, "first"};
      std::array<PageNumber, 2> pages;  // has to outlive the hold
      const auto hold = *table_.Hold(0, {&use, 1}, rows);
      ATTEND_FUZZ_REQUIRE(hold->Reserve(pages.data(), std::ssize(pages)).ok(), "reserved");
      hold->Commit();
    }
  }

  SessionTable& table() { return table_; }

 private:
  const SteadyClock clock_;
  char next_ = 'a';
  test::TestArena arena_{int64_t{2} << 20};
  SessionTable table_{
      SessionOptions{
          .slab_bytes = 1 << 20, .lease_default = std::chrono::hours(24), .tenant_weights = {1}},
      clock_, [this]() -> Result<std::string> { return std::string("session-") + next_++; },
      std::vector{SessionDevice{.arena = &arena_}}};
};

}  // namespace attend::fuzz

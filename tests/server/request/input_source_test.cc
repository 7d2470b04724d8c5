// SPDX-License-Identifier: Apache-2.0

#include "server/request/input_source.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

constexpr int64_t kSlabBytes = 64 * 1024;

class InputSourceTest : public ::testing::Test {
 protected:
  InputSourceTest() {
    const auto made = table_.Create(0, {0, {{DType::kFloat16, 1, 8, 8}}});
    const CacheUse use{made->id, 0, 0, ""};
    source_.SetCache(*table_.Hold(0, {&use, 1}, 3));
    EXPECT_TRUE(source_.cache()->Reserve(&page_, 1).ok());
  }

  test::ManualClock clock_;
  test::TestArena arena_{2 * kSlabBytes};
  SessionTable table_{{.slab_bytes = kSlabBytes, .tenant_weights = {1}},
                      clock_,
                      []() -> Result<std::string> { return std::string("id"); },
                      std::vector{SessionDevice{&arena_, {}}}};
  PageNumber page_ = 0;
  InputSource source_;
};

// Q, the new rows of K and V, a bias, O and LSE in a client's memory, K and V in pages.
TEST_F(InputSourceTest, FindsTensorsInPlaceAndInSessions) {
  std::array<std::array<char, 64>, 6> tensors;
  auto shared = std::make_unique<SharedTensors>();
  shared->device = 0;
  for (auto& tensor : tensors) shared->in_place.Add({tensor.data(), std::ssize(tensor)});
  source_.SetShared(std::move(shared));
  WorkItem item;
  source_.ApplyTo(item);
  EXPECT_EQ(item.in_place.size(), 7);
  EXPECT_TRUE(item.in_place.Contains(arena_.memory().data, arena_.memory().bytes));
  for (const auto& tensor : tensors) {
    EXPECT_TRUE(item.in_place.Contains(tensor.data(), std::ssize(tensor)));
  }
}

TEST_F(InputSourceTest, CommitsAppendedRowsAndReleasesItsHolds) {
  EXPECT_EQ(source_.pinned_device(), 0);
  source_.Commit();
  source_.End();
  EXPECT_EQ(table_.Get(0, "id")->length, 3);
  source_.End();  // again, as a request does when it ends
  EXPECT_TRUE(table_.Consistent());
}

}  // namespace
}  // namespace attend

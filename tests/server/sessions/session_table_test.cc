// SPDX-License-Identifier: Apache-2.0
//
// Named cases; for random histories see session_model_test.

#include "server/sessions/session_table.h"

#include <gtest/gtest.h>

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/limits.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kPageBytes = 4096;  // the minimum: 16 rows of 1 head, D 8, in fp16 are smaller
constexpr int64_t kSlabBytes = 4 * kPageBytes;
constexpr int64_t kPages = 16;
const LayerShape kShape{DType::kFloat16, 1, 8, 8};

class SessionTableTest : public ::testing::Test {
 protected:
  SessionTableTest() {
    SessionOptions options{.tenant_weights = {1, 1}};
    options.page_rows = kRows;
    options.slab_bytes = kSlabBytes;
    options.sessions_max = 8;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}, SessionDevice{&other_, {}}, SessionDevice{}});
  }
  ~SessionTableTest() override { EXPECT_TRUE(table_->Consistent()); }

  std::string Make(int tenant, int64_t tokens, bool pinned = false) {
    const Result<SessionInfo> made =
        table_->Create(tenant, {0, {kShape}, std::chrono::seconds(60), pinned});
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_TRUE(Append(tenant, made->id, 0, tokens).ok());
    clock_.Advance(std::chrono::milliseconds(1));
    return made->id;
  }
  Status Append(int tenant, const std::string& id, int64_t length, int64_t rows, int layer = 0) {
    const CacheUse use{id, layer, length, ""};
    std::vector<PageNumber> table;  // outlives the hold
    const auto hold = table_->Hold(tenant, {&use, 1}, rows);
    if (!hold.ok()) return hold.status();
    table.resize(static_cast<size_t>((length + rows + kRows - 1) / kRows));
    ATTEND_RETURN_IF_ERROR((*hold)->Reserve(table.data(), std::ssize(table)));
    if (rows > 0) (*hold)->Commit();
    return Status();
  }
  int64_t Length(int tenant, const std::string& id) {
    const Result<SessionInfo> info = table_->Get(tenant, id);
    return info.ok() ? info->length : -1;
  }

  test::ManualClock clock_;
  test::TestArena arena_{kPages * kPageBytes + kPageUnitBytes};
  test::TestArena other_{2 * kPages * kPageBytes + kPageUnitBytes};
  int ids_ = 0;
  std::unique_ptr<SessionTable> table_;
};

TEST_F(SessionTableTest, ARequestThatNeverFitsEvictsNothing) {
  const std::string idle = Make(0, 6 * kRows);
  const std::string needy = Make(0, kRows);
  const Status status = Append(0, needy, kRows, kPages * kRows);
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();  // not retryable
  EXPECT_NE(status.message().find("sessions[0]: an append of 256 rows needs 17 pages of 4096"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(Length(0, idle), 6 * kRows);
  EXPECT_EQ(table_->stats().evictions_own, 0);
  // Nor does the largest possible request.
  EXPECT_EQ(Append(0, needy, kRows, INT64_MAX).code(), Code::kInvalidArgument);
  EXPECT_EQ(Append(0, needy, kRows, kLengthMax).code(), Code::kInvalidArgument);
}

TEST_F(SessionTableTest, AHoldAloneTakesNoPages) {
  const std::string idle = Make(0, 6 * kRows);
  const std::string needy = Make(0, 5 * kRows);
  const int64_t used = table_->memory(0).used_bytes;
  const CacheUse use{needy, 0, 5 * kRows, ""};
  const auto hold = table_->Hold(0, {&use, 1}, 4 * kRows);  // would fit if `idle` were evicted
  ASSERT_TRUE(hold.ok());
  EXPECT_EQ((*hold)->length_max(), 9 * kRows);
  EXPECT_EQ(table_->memory(0).used_bytes, used);
  EXPECT_EQ(Length(0, idle), 6 * kRows);
}

TEST_F(SessionTableTest, EvictsTheLeastRecentlyUsedFromItsEnd) {
  const std::string oldest = Make(0, 4 * kRows);
  const std::string older = Make(0, 4 * kRows);
  const std::string needy = Make(0, 4 * kRows);
  EXPECT_TRUE(Append(0, needy, 4 * kRows, 2 * kRows).ok());
  EXPECT_EQ(Length(0, oldest), 2 * kRows);
  EXPECT_EQ(Length(0, older), 4 * kRows);
  // Its client is told how much remains, and appends the tail.
  const Status status = Append(0, oldest, 4 * kRows, 1);
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_NE(status.message().find("has 32 tokens"), std::string::npos) << status.message();
}

TEST_F(SessionTableTest, PinnedSessionsAndTenantsWithinTheirPartLoseNothing) {
  const std::string pinned = Make(0, 5 * kRows, true);
  const std::string other = Make(1, 4 * kRows);  // exactly its part
  const std::string needy = Make(0, 7 * kRows);
  EXPECT_EQ(Append(0, needy, 7 * kRows, kRows).code(), Code::kResourceExhausted);
  EXPECT_EQ(Length(0, pinned), 5 * kRows);
  EXPECT_EQ(Length(1, other), 4 * kRows);
}

TEST_F(SessionTableTest, ATenantBeyondItsPartLosesOnlyTheExcess) {
  const std::string greedy = Make(1, 12 * kRows);
  const std::string needy = Make(0, 4 * kRows);
  EXPECT_TRUE(Append(0, needy, 4 * kRows, 4 * kRows).ok());
  EXPECT_EQ(Length(1, greedy), 8 * kRows);
  EXPECT_TRUE(Append(0, needy, 8 * kRows, 4 * kRows).ok());
  EXPECT_EQ(Length(1, greedy), 4 * kRows);
  EXPECT_EQ(Append(0, Make(0, 0), 0, 13 * kRows).code(), Code::kInvalidArgument);
  EXPECT_EQ(table_->stats().evictions_others, 2);
}

TEST_F(SessionTableTest, ALeaseEndsUnlessItIsUsed) {
  const std::string used = Make(0, 1);
  const std::string idle = Make(0, 1);
  clock_.Advance(std::chrono::seconds(59));
  EXPECT_TRUE(table_->KeepAlive(0, used).ok());
  clock_.Advance(std::chrono::seconds(2));
  table_->Expire();
  EXPECT_EQ(Length(0, used), 1);
  EXPECT_EQ(Length(0, idle), -1);
  EXPECT_EQ(table_->stats().expired, 1);
}

TEST_F(SessionTableTest, AReservationIsRefusedIfTheSessionChangedSinceTheHold) {
  const std::string id = Make(0, 3 * kRows);
  const CacheUse use{id, 0, 3 * kRows, "one"};
  std::vector<PageNumber> table(8);
  const auto reserve = [&](const auto& hold) {
    return (*hold)->Reserve(table.data(), std::ssize(table)).code();
  };
  const auto cut = table_->Hold(0, {&use, 1}, 1);
  ASSERT_TRUE(table_->Truncate(0, id, 5).ok());
  EXPECT_EQ(reserve(cut), Code::kFailedPrecondition);
  const CacheUse shorter{id, 0, 5, "one"};
  const auto first = table_->Hold(0, {&shorter, 1}, 1);
  const auto again = table_->Hold(0, {&shorter, 1}, 1);
  EXPECT_EQ(reserve(first), Code::kOk);
  EXPECT_EQ(reserve(again), Code::kUnavailable);  // under way
  (*first)->Commit();
  EXPECT_EQ(reserve(again), Code::kUnavailable);  // done: a retry finds it
  (*first)->End();
  const auto found = table_->Hold(0, {&shorter, 1}, 1);
  EXPECT_EQ((*found)->append_rows(), 0);
  ASSERT_TRUE(table_->Free(0, id).ok());
  EXPECT_EQ(reserve(found), Code::kNotFound);
}

TEST_F(SessionTableTest, OtherCallsProceedWhileAForkIsCopied) {
  const std::string id = Make(0, kRows + 3);
  const std::string other = Make(0, 1);
  arena_.on_copy = [&] {
    EXPECT_TRUE(Append(0, other, 1, 1).ok());
    EXPECT_TRUE(Append(0, id, kRows + 3, 2).ok());  // behind the cut
  };
  const Result<SessionInfo> fork = table_->Fork(0, id, {});
  ASSERT_TRUE(fork.ok()) << fork.status().ToString();
  EXPECT_EQ(fork->length, kRows + 3);
  EXPECT_EQ(Length(0, id), kRows + 5);
}

TEST_F(SessionTableTest, AForkIsCompleteAlthoughItsOriginIsFreedMeanwhile) {
  const std::string id = Make(0, kRows + 3);
  arena_.on_copy = [&] { EXPECT_TRUE(table_->Free(0, id).ok()); };
  const Result<SessionInfo> fork = table_->Fork(0, id, {});
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(table_->memory(0).used_bytes, 2 * kPageBytes);
}

TEST_F(SessionTableTest, AppendsWaitForATruncationAndReadersDoNot) {
  const std::string id = Make(0, kRows + 9);
  ASSERT_TRUE(table_->Fork(0, id, kRows + 9).ok());
  const CacheUse use{id, 0, kRows + 9, ""};
  std::vector<PageNumber> table(2);
  const auto reader = table_->Hold(0, {&use, 1}, 0);
  ASSERT_TRUE((*reader)->Reserve(table.data(), 2).ok());  // so that the page is shared
  int copies = 0;
  arena_.on_copy = [&] {
    ++copies;
    EXPECT_EQ(Append(0, id, kRows + 9, 1).code(), Code::kUnavailable);
    EXPECT_EQ(table_->Truncate(0, id, 1).status().code(), Code::kUnavailable);
    EXPECT_TRUE(Append(0, id, kRows + 9, 0).ok());
  };
  const Result<SessionInfo> cut = table_->Truncate(0, id, kRows + 2);
  ASSERT_TRUE(cut.ok()) << cut.status().ToString();
  EXPECT_EQ(copies, 1);
  EXPECT_EQ(cut->length, kRows + 2);
  arena_.on_copy = {};
  EXPECT_TRUE(Append(0, id, kRows + 2, 1).ok());
}

TEST_F(SessionTableTest, ASessionFreedWhileItIsTruncatedIsGone) {
  const std::string id = Make(0, kRows + 9);
  const CacheUse use{id, 0, kRows + 9, ""};
  std::vector<PageNumber> table(2);
  auto reader = table_->Hold(0, {&use, 1}, 0);
  ASSERT_TRUE((*reader)->Reserve(table.data(), 2).ok());
  arena_.on_copy = [&] { EXPECT_TRUE(table_->Free(0, id).ok()); };
  EXPECT_EQ(table_->Truncate(0, id, kRows + 2).status().code(), Code::kNotFound);
  reader->reset();
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
}

TEST_F(SessionTableTest, AForkWithoutALengthOfUnequalLayersIsRefused) {
  const std::string id =
      table_->Create(0, {0, {kShape, kShape}, std::chrono::seconds(60), false})->id;
  EXPECT_EQ(table_->Fork(0, id, {})->length, 0);
  ASSERT_TRUE(Append(0, id, 0, kRows + 3).ok());  // to the first layer
  const Result<SessionInfo> refused = table_->Fork(0, id, {});
  EXPECT_EQ(refused.status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(refused.status().message(),
            "length is not given, but the session's layers have 0 to 19 tokens: give one in "
            "[0, 0]");
  ASSERT_TRUE(Append(0, id, 0, kRows + 3, 1).ok());
  EXPECT_EQ(table_->Fork(0, id, {})->length, kRows + 3);
}

// A fork or reader that begins while a truncation copies refers to pages that are then cut.
TEST_F(SessionTableTest, PagesCutDuringAReadStayUnchanged) {
  const LayerShape shapes[] = {kShape, kShape};
  const Result<SessionInfo> made =
      table_->Create(0, {0, {shapes[0], shapes[1]}, std::chrono::seconds(60)});
  const std::string id = made->id;
  std::list<std::vector<PageNumber>> tables;  // outlive the holds
  std::vector<std::unique_ptr<CacheHold>> holds;
  const auto hold = [&](int64_t layer, int64_t length, int64_t rows) {
    const CacheUse use{id, layer, length, ""};
    std::vector<PageNumber>& table = tables.emplace_back(2);
    holds.push_back(*table_->Hold(0, {&use, 1}, rows));
    EXPECT_TRUE(holds.back()->Reserve(table.data(), 2).ok());
    if (rows > 0) holds.back()->Commit();
    return table;
  };
  for (int64_t layer = 0; layer < 2; ++layer) hold(layer, 0, kRows + 9);
  holds.clear();
  hold(0, kRows + 9, 0);  // layer 0 is being read, so that there is something to copy
  std::vector<PageNumber> read;
  arena_.on_copy = [&] { read = hold(1, kRows + 9, 0); };  // and now layer 1 too
  ASSERT_TRUE(table_->Truncate(0, id, kRows + 2).ok());
  arena_.on_copy = {};
  const std::vector<PageNumber> written = hold(1, kRows + 2, 3);
  EXPECT_EQ(written[0], read[0]);
  EXPECT_NE(written[1], read[1]);
}

// They do not wait for readers that came later: others would wait for them in vain.
TEST_F(SessionTableTest, CutPagesAreFreedWithTheReadersThatBeganBefore) {
  const std::string id = Make(0, 6 * kRows);
  const auto pages = [&] { return table_->memory(0).used_bytes / kPageBytes; };
  std::list<std::vector<PageNumber>> tables;  // outlive the holds
  const auto read = [&](int64_t length) {
    const CacheUse use{id, 0, length, ""};
    std::vector<PageNumber>& table = tables.emplace_back(6);
    std::unique_ptr<CacheHold> hold = *table_->Hold(0, {&use, 1}, 0);
    EXPECT_TRUE(hold->Reserve(table.data(), 6).ok());
    return hold;
  };
  std::unique_ptr<CacheHold> first = read(6 * kRows), second = read(6 * kRows);
  ASSERT_TRUE(table_->Truncate(0, id, 4 * kRows).ok());
  std::unique_ptr<CacheHold> third = read(4 * kRows);
  ASSERT_TRUE(table_->Truncate(0, id, 3 * kRows).ok());
  ASSERT_TRUE(table_->Truncate(0, id, kRows).ok());  // no reader began in between
  std::unique_ptr<CacheHold> fourth = read(kRows);
  EXPECT_EQ(pages(), 6);
  second->End();
  EXPECT_EQ(pages(), 6);
  first->End();
  EXPECT_EQ(pages(), 4);
  ASSERT_TRUE(table_->Free(0, id).ok());
  EXPECT_EQ(pages(), 4);
  third->End();
  EXPECT_EQ(pages(), 1);
  fourth->End();
  EXPECT_EQ(pages(), 0);
}

TEST_F(SessionTableTest, SharedPagesOfIdleForksAreEvicted) {
  const std::string id = Make(0, 8 * kRows);
  ASSERT_TRUE(table_->Fork(0, id, {}).ok());
  const std::string needy = Make(0, kRows);
  EXPECT_TRUE(Append(0, needy, kRows, 6 * kRows).ok());
  EXPECT_EQ(Length(0, id), 5 * kRows);
}

TEST_F(SessionTableTest, AnAppendRetriedAfterAnEvictionIsToldTheRemainingLength) {
  const std::string id = Make(0, 0);
  const CacheUse use{id, 0, 0, "prompt"};
  std::vector<PageNumber> table(8);
  {
    const auto hold = table_->Hold(0, {&use, 1}, 8 * kRows);
    ASSERT_TRUE((*hold)->Reserve(table.data(), 8).ok());
    (*hold)->Commit();
  }
  Make(0, 6 * kRows);
  EXPECT_EQ(Length(0, id), 6 * kRows);
  EXPECT_EQ(table_->Hold(0, {&use, 1}, 8 * kRows).status().code(), Code::kOutOfRange);
}

TEST_F(SessionTableTest, ATruncationToTheCurrentLengthKeepsRetriesRecognised) {
  const std::string id = Make(0, 0);
  const CacheUse use{id, 0, 0, "one"};
  std::vector<PageNumber> table(1);
  {
    const auto hold = table_->Hold(0, {&use, 1}, 5);
    ASSERT_TRUE((*hold)->Reserve(table.data(), 1).ok());
    (*hold)->Commit();
  }
  ASSERT_TRUE(table_->Truncate(0, id, 5).ok());
  const auto again = table_->Hold(0, {&use, 1}, 5);
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  EXPECT_EQ((*again)->append_rows(), 0);
}

TEST_F(SessionTableTest, APageBeingTruncatedCountsAsSharedUntilTheEnd) {
  const std::string id = Make(0, 3 * kRows);
  const std::string fork = table_->Fork(0, id, {})->id;
  arena_.on_copy = [&] {
    EXPECT_TRUE(table_->Free(0, id).ok());
    EXPECT_TRUE(table_->Consistent());
    EXPECT_EQ(table_->Get(0, fork)->shared_bytes, 3 * kPageBytes);
  };
  EXPECT_EQ(table_->Truncate(0, id, kRows + 1).status().code(), Code::kNotFound);
  EXPECT_EQ(table_->Get(0, fork)->shared_bytes, 0);
  EXPECT_EQ(table_->memory(0).used_bytes, 3 * kPageBytes);
}

// All sequences of a request are appended to, or none.
TEST_F(SessionTableTest, ARetryOfAPartlyDoneAppendIsRefused) {
  const std::string one = Make(0, 0), two = Make(0, 0);
  const auto use = [](const std::string& id) { return CacheUse{id, 0, 0, "same"}; };
  std::vector<PageNumber> table(2);
  {
    const CacheUse alone = use(one);
    const auto hold = table_->Hold(0, {&alone, 1}, 3);
    ASSERT_TRUE((*hold)->Reserve(table.data(), 1).ok());
    (*hold)->Commit();
  }
  const CacheUse both[] = {use(one), use(two)};
  EXPECT_EQ(table_->Hold(0, both, 3).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Length(0, two), 0);
}

TEST_F(SessionTableTest, ChoosesTheDeviceWithMostFreeMemory) {
  EXPECT_EQ(table_->ChooseDevice({true, true, true}), 1);
  EXPECT_EQ(table_->ChooseDevice({true, false, true}), 0);
  EXPECT_EQ(table_->ChooseDevice({false, false, true}), -1);  // it has no memory for sessions
  const Result<SessionInfo> there = table_->Create(0, {1, {kShape}});
  ASSERT_TRUE(there.ok());
  ASSERT_TRUE(Append(0, there->id, 0, 20 * kRows).ok());
  EXPECT_EQ(table_->ChooseDevice({true, true, true}), 0);
}

TEST_F(SessionTableTest, TheNumberOfSessionsIsBounded) {
  for (int n = 0; n < 6; ++n) Make(0, 1);
  const Status one_more = table_->Create(0, {0, {kShape}}).status();
  EXPECT_EQ(one_more.code(), Code::kResourceExhausted);
  EXPECT_NE(one_more.message().find("max-sessions"), std::string::npos) << one_more.message();
  EXPECT_EQ(table_->Fork(0, "1", {}).status().ToString(), one_more.ToString());
}

}  // namespace
}  // namespace attend

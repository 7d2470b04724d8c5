// SPDX-License-Identifier: Apache-2.0
//
// KeepDraft by name; random histories are in session_model_test.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "server/sessions/session_table.h"
#include "tests/kernels/support/manual_clock.h"
#include "tests/server/support/test_arena.h"

namespace attend {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kHeads = 64;
constexpr int64_t kDim = 8;
const LayerShape kShape{DType::kFloat16, kHeads, kDim, kDim};
using Kept = std::vector<int64_t>;

class SessionDraftsTest : public ::testing::Test {
 protected:
  SessionDraftsTest() {
    SessionOptions options{.tenant_weights = {1}};
    options.page_rows = kRows;
    options.slab_bytes = int64_t{1} << 20;
    table_ = std::make_unique<SessionTable>(
        options, clock_, [this]() -> Result<std::string> { return std::to_string(++ids_); },
        std::vector{SessionDevice{&arena_, {}}});
  }
  ~SessionDraftsTest() override { EXPECT_TRUE(table_->Consistent()); }

  std::string Make(int64_t tokens, int layers = 1) {
    const SessionSpec spec{0, std::vector<LayerShape>(static_cast<size_t>(layers), kShape)};
    const std::string id = table_->Create(0, spec)->id;
    for (int layer = 0; layer < layers; ++layer) Append(id, layer, 0, tokens);
    return id;
  }
  // Token n's rows of K and V have the byte n in them.
  void Append(const std::string& id, int layer, int64_t length, int64_t rows) {
    Visit(id, layer, length, rows, [&](char* row, int64_t bytes, int64_t token) {
      if (token >= length)
        std::memset(row, static_cast<int>(token & 0xff), static_cast<size_t>(bytes));
    });
  }
  // The tokens that the layer has, as their rows tell; -1: its rows differ.
  std::vector<int64_t> Tokens(const std::string& id, int layer = 0) {
    std::vector<int64_t> tokens(static_cast<size_t>(table_->Get(0, id)->layer_lengths[layer]), -2);
    Visit(id, layer, std::ssize(tokens), 0, [&](const char* row, int64_t bytes, int64_t token) {
      int64_t& found = tokens[static_cast<size_t>(token)];
      const auto first = static_cast<uint8_t>(row[0]);
      if (found == -2) found = first;
      if (!std::all_of(row, row + bytes,
                       [&](char byte) { return static_cast<uint8_t>(byte) == found; })) {
        found = -1;
      }
    });
    return tokens;
  }
  template <class Row>
  void Visit(const std::string& id, int layer, int64_t length, int64_t rows, const Row& visit) {
    const CacheUse use{id, layer, length, ""};
    std::vector<PageNumber> table(static_cast<size_t>((length + rows + kRows - 1) / kRows));
    const auto hold = table_->Hold(0, {&use, 1}, rows);
    ASSERT_TRUE(hold.ok()) << hold.status().ToString();
    ASSERT_TRUE((*hold)->Reserve(table.data(), std::ssize(table)).ok());
    for (int64_t token = 0; token < length + rows; ++token) {
      char* const page =
          (*hold)->base() + int64_t{table[static_cast<size_t>(token / kRows)]} * kPageUnitBytes;
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t at = (head * kRows + token % kRows) * kDim * 2;
        visit(page + at, kDim * 2, token);
        visit(page + (*hold)->layout().k_bytes + at, kDim * 2, token);
      }
    }
    if (rows > 0) (*hold)->Commit();
  }
  std::string Refusal(const std::string& id, int64_t length, const Kept& kept, Code code) {
    const Status status = table_->KeepDraft(0, id, length, kept).status();
    EXPECT_EQ(status.code(), code) << status.ToString();
    return status.message();
  }

  test::ManualClock clock_;
  test::TestArena arena_{(int64_t{16} << 20) + kPageUnitBytes};
  int ids_ = 0;
  std::unique_ptr<SessionTable> table_;
};

std::vector<int64_t> UpTo(int64_t end) {
  std::vector<int64_t> tokens;
  for (int64_t token = 0; token < end; ++token) tokens.push_back(token & 0xff);
  return tokens;
}

TEST_F(SessionDraftsTest, KeptTokensFollowThePrefixInAllLayers) {
  const std::string id = Make(40, 2);
  const Result<SessionInfo> kept = table_->KeepDraft(0, id, 21, Kept{0, 3, 4, 17});
  ASSERT_TRUE(kept.ok()) << kept.status().ToString();
  EXPECT_EQ(kept->layer_lengths, (std::vector<int64_t>{25, 25}));
  std::vector<int64_t> wanted = UpTo(21);
  for (const int64_t token : {21, 24, 25, 38}) wanted.push_back(token);
  EXPECT_EQ(Tokens(id, 0), wanted);
  EXPECT_EQ(Tokens(id, 1), wanted);
  EXPECT_EQ(table_->memory(0).used_bytes, kept->bytes);
  Append(id, 0, 25, 30);
  EXPECT_EQ(Tokens(id, 0)[54], 54);
}

TEST_F(SessionDraftsTest, TheSameCallAgainChangesNothing) {
  const std::string id = Make(40);
  const Kept kept = {1, 9};
  ASSERT_TRUE(table_->KeepDraft(0, id, 30, kept).ok());
  const std::vector<int64_t> tokens = Tokens(id);
  int copies = 0;
  arena_.on_copy = [&] { ++copies; };
  for (int n = 0; n < 2; ++n) {
    const Result<SessionInfo> again = table_->KeepDraft(0, id, 30, kept);
    ASSERT_TRUE(again.ok()) << again.status().ToString();
    EXPECT_EQ(again->length, 32);
  }
  EXPECT_EQ(copies, 0);
  EXPECT_EQ(Tokens(id), tokens);
  // Another one, or after something else, is not the same.
  Refusal(id, 30, {0, 9}, Code::kOutOfRange);
  Append(id, 0, 32, 1);
  Refusal(id, 30, kept, Code::kOutOfRange);
}

TEST_F(SessionDraftsTest, TokensInTheirPlaceAreATruncation) {
  const std::string id = Make(40);
  arena_.on_copy = [] { ADD_FAILURE() << "nothing moves"; };
  ASSERT_TRUE(table_->KeepDraft(0, id, 30, Kept{0, 1, 2}).ok());
  ASSERT_TRUE(table_->KeepDraft(0, id, 30, Kept{0, 1, 2}).ok());
  EXPECT_EQ(Tokens(id), UpTo(33));
  ASSERT_TRUE(table_->KeepDraft(0, id, 30, {}).ok());
  EXPECT_EQ(Tokens(id), UpTo(30));
}

TEST_F(SessionDraftsTest, ForksAndReadersKeepTheirPages) {
  const std::string id = Make(40);
  const std::string fork = table_->Fork(0, id, {})->id;
  const std::string early = table_->Fork(0, id, 10)->id;
  const CacheUse use{id, 0, 40, ""};
  std::vector<PageNumber> table(3);
  const auto reader = table_->Hold(0, {&use, 1}, 0);
  ASSERT_TRUE((*reader)->Reserve(table.data(), 3).ok());
  arena_.on_copy = [&] {
    EXPECT_EQ(table_->Truncate(0, id, 1).status().code(), Code::kUnavailable);
    EXPECT_EQ(Refusal(id, 5, {1}, Code::kUnavailable),
              "session: an append or a truncation is under way");
  };
  ASSERT_TRUE(table_->KeepDraft(0, id, 5, Kept{2, 34}).ok());
  arena_.on_copy = {};
  EXPECT_EQ(Tokens(fork), UpTo(40));
  EXPECT_EQ(Tokens(early), UpTo(10));
  EXPECT_EQ(Tokens(id), (std::vector<int64_t>{0, 1, 2, 3, 4, 7, 39}));
}

TEST_F(SessionDraftsTest, ALongDraftIsCopiedInSeveralParts) {
  const std::string id = Make(9 + 1024);
  Kept kept;
  for (int64_t token = 1; token < 1024; token += 2) kept.push_back(token);
  int copies = 0;
  arena_.on_copy = [&] { ++copies; };
  ASSERT_TRUE(table_->KeepDraft(0, id, 9, kept).ok());
  EXPECT_GT(copies, 1);
  std::vector<int64_t> wanted = UpTo(9);
  for (const int64_t token : kept) wanted.push_back((9 + token) & 0xff);
  EXPECT_EQ(Tokens(id), wanted);
}

TEST_F(SessionDraftsTest, AFailedCopyLeavesTheSession) {
  const std::string id = Make(40);
  const int64_t used = table_->memory(0).used_bytes;
  arena_.on_copy = [] { throw std::bad_alloc(); };
  Refusal(id, 20, {1}, Code::kResourceExhausted);
  arena_.on_copy = [&] { EXPECT_TRUE(table_->Free(0, id).ok()); };
  EXPECT_EQ(Tokens(id), UpTo(40));
  EXPECT_EQ(table_->memory(0).used_bytes, used);
  EXPECT_EQ(Refusal(id, 20, {1}, Code::kNotFound), "session: freed in the meantime");
  EXPECT_EQ(table_->memory(0).used_bytes, 0);
}

TEST_F(SessionDraftsTest, InvalidDraftsAreRefused) {
  const std::string id = Make(40);
  EXPECT_EQ(Refusal(id, 30, {3, 3}, Code::kInvalidArgument),
            "kept[1] is 3, must be in [4, 1023]: ascending, of at most 1024 tokens");
  EXPECT_EQ(Refusal(id, 30, {-1}, Code::kInvalidArgument),
            "kept[0] is -1, must be in [0, 1023]: ascending, of at most 1024 tokens");
  EXPECT_EQ(Refusal(id, 30, {1024}, Code::kInvalidArgument),
            "kept[0] is 1024, must be in [0, 1023]: ascending, of at most 1024 tokens");
  EXPECT_EQ(Refusal(id, 30, Kept(1025), Code::kInvalidArgument),
            "kept has 1025 entries, must have at most 1024");
  EXPECT_EQ(Refusal(id, 30, {1, 10}, Code::kOutOfRange),
            "kept has 10, the draft after length 30 has 10 tokens");
  EXPECT_EQ(Refusal(id, 41, {}, Code::kOutOfRange),
            "length is 41, must be in [0, 40]: a draft has at most 1024 tokens");
  Refusal(id, -1, {}, Code::kOutOfRange);
  Refusal(id, INT64_MAX, {0}, Code::kOutOfRange);
  Refusal("unknown", 0, {}, Code::kNotFound);
  const std::string long_one = Make(1100);
  EXPECT_EQ(Refusal(long_one, 75, {1}, Code::kOutOfRange),
            "length is 75, must be in [76, 1100]: a draft has at most 1024 tokens");
  const std::string uneven = Make(20, 2);
  Append(uneven, 1, 20, 1);
  EXPECT_EQ(Refusal(uneven, 10, {1}, Code::kFailedPrecondition),
            "the session's layers have 20 to 21 tokens, must have the same draft: append to all, "
            "or truncate");
  EXPECT_EQ(Tokens(id), UpTo(40));
}

}  // namespace
}  // namespace attend

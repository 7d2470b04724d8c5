// SPDX-License-Identifier: Apache-2.0

#include "server/wire/message_slices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace attend {
namespace {

class MessageSlicesTest : public testing::Test {
 protected:
  // A message in this many pieces with the same bytes.
  void TakeMessage(int count) {
    InMessage message;
    for (int i = 0; i < count; ++i) message.pieces.push_back({*bytes_, bytes_});
    slices_.Take(std::move(message));
    EXPECT_EQ(slices_.bytes(), std::ssize(*bytes_) * count);
  }
  // Expects this many pieces to be held.
  void ExpectHeld(int count) const { EXPECT_EQ(bytes_.use_count(), count + 1); }
  std::string Text() const {
    std::string all;
    for (const ByteSpan span : slices_.spans()) all.append(span.begin(), span.end());
    return all;
  }

  const std::shared_ptr<std::string> bytes_ = std::make_shared<std::string>(4096, 'x');
  MessageSlices slices_;
};

TEST_F(MessageSlicesTest, TheMessageIsReadInPlaceUntilReleased) {
  TakeMessage(3);
  ExpectHeld(3);
  ASSERT_EQ(slices_.spans().size(), 3u);
  EXPECT_EQ(slices_.spans()[2].data(), reinterpret_cast<const uint8_t*>(bytes_->data()));
  EXPECT_FALSE(slices_.lent());
  slices_.Release();
  ExpectHeld(0);
  EXPECT_TRUE(slices_.spans().empty());
}

TEST_F(MessageSlicesTest, MovingKeepsThePieces) {
  TakeMessage(3);
  {
    MessageSlices moved = std::move(slices_);
    EXPECT_EQ(moved.spans().size(), 3u);
    ExpectHeld(3);
  }
  ExpectHeld(0);
}

TEST_F(MessageSlicesTest, TakenPiecesStay) {
  TakeMessage(3);
  {
    const std::vector<MessagePiece> held = slices_.TakePieces();
    slices_ = MessageSlices();
    EXPECT_EQ(held.size(), 3u);
    ExpectHeld(3);
  }
  ExpectHeld(0);
}

TEST_F(MessageSlicesTest, TheNextMessageFreesTheLastOne) {
  TakeMessage(2);
  TakeMessage(3);
  ExpectHeld(3);
  EXPECT_EQ(Text().size(), 3u * 4096);
}

TEST_F(MessageSlicesTest, ALentMessageIsReadInPlaceUntilItIsOwned) {
  for (const bool more : {false, true}) {
    slices_.Take({*bytes_, {}});
    EXPECT_TRUE(slices_.lent());
    EXPECT_EQ(slices_.bytes(), std::ssize(*bytes_));
    EXPECT_EQ(slices_.spans()[0].data(), reinterpret_cast<const uint8_t*>(bytes_->data()));
    const uint8_t appended[] = {'y', 'z'};
    if (more) slices_.Append(appended);
    const std::string expected = *bytes_ + (more ? "yz" : "");
    EXPECT_EQ(Text(), expected);
    slices_.Own();
    EXPECT_FALSE(slices_.lent());
    std::fill(bytes_->begin(), bytes_->end(), '?');
    MessageSlices moved = std::move(slices_);
    slices_ = std::move(moved);
    EXPECT_EQ(Text(), expected);
    slices_.Release();
    EXPECT_TRUE(slices_.spans().empty());
    bytes_->assign(4096, 'x');
  }
}

}  // namespace
}  // namespace attend

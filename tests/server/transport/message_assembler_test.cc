// SPDX-License-Identifier: Apache-2.0

#include "server/transport/message_assembler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/server/support/http2_client.h"

namespace attend {
namespace {

constexpr int64_t kMost = 100000;

// The messages of a stream that comes in pieces of up to `piece` bytes.
Status Cut(MessageAssembler& assembler, std::string_view stream, size_t piece,
           std::vector<std::string>& messages) {
  while (!stream.empty()) {
    std::string_view bytes = stream.substr(0, piece);
    stream.remove_prefix(bytes.size());
    while (!bytes.empty()) {
      InMessage message;
      bool whole = false;
      ATTEND_RETURN_IF_ERROR(assembler.Take(bytes, nullptr, message, whole));
      if (whole) messages.push_back(message.Text());
    }
  }
  return Status();
}

TEST(MessageAssembler, FindsMessagesInPiecesOfAnySize) {
  std::mt19937 random(std::random_device{}());
  std::vector<std::string> sent;
  std::string stream;
  for (int i = 0; i < 50; ++i) {
    sent.emplace_back(i % 5 == 0 ? 0 : random() % 300, static_cast<char>('a' + i % 26));
    stream += Framed(sent.back());
  }
  for (const size_t piece : {1, 2, 3, 5, 7, 64, 1000, 100000}) {
    MessageAssembler assembler({kMost});
    std::vector<std::string> messages;
    ASSERT_TRUE(Cut(assembler, stream, piece, messages).ok());
    EXPECT_EQ(messages, sent) << piece;
    EXPECT_FALSE(assembler.under_way());
  }
}

TEST(MessageAssembler, WholeMessagesAreNotCopied) {
  const std::string stream = Framed("hello");
  std::string_view bytes = stream;
  MessageAssembler assembler({kMost});
  InMessage message;
  bool whole = false;
  ASSERT_TRUE(assembler.Take(bytes, nullptr, message, whole).ok());
  ASSERT_TRUE(whole);
  EXPECT_EQ(message.bytes.data(), stream.data() + 5);
  EXPECT_TRUE(message.pieces.empty());
  EXPECT_EQ(message.Text(), "hello");
}

TEST(MessageAssembler, ALengthAloneAllocatesNothing) {
  const std::string prefix = Framed(std::string(kMost, 'x')).substr(0, 6);
  MessageAssembler assembler({kMost});
  std::string_view bytes = prefix;
  InMessage message;
  bool whole = true;
  ASSERT_TRUE(assembler.Take(bytes, nullptr, message, whole).ok());
  EXPECT_FALSE(whole);
  EXPECT_TRUE(assembler.under_way());
  EXPECT_LE(assembler.held_bytes(), 256 << 10);
}

TEST(MessageAssembler, ALargeMessageIsNotMovedAsItGrows) {
  constexpr size_t kBytes = 3 << 20;
  MessageAssembler assembler({kBytes});
  const std::string stream = Framed(std::string(kBytes, 'x'));
  std::string_view left = stream;
  InMessage message;
  bool whole = false;
  while (!whole) {
    std::string_view piece = left.substr(0, 10000);
    left.remove_prefix(piece.size());
    ASSERT_TRUE(assembler.Take(piece, nullptr, message, whole).ok());
    ASSERT_LE(assembler.held_bytes(), static_cast<int64_t>(kBytes + (kBytes >> 4)));
  }
  EXPECT_GT(message.pieces.size(), 1u);
  EXPECT_EQ(message.Text(), std::string(kBytes, 'x'));
  EXPECT_EQ(assembler.held_bytes(), 0);
}

// Large pieces stay where they were read as long as the message is held; small ones are copied, so
// that a few bytes do not keep a block.
TEST(MessageAssembler, RefersToLargePiecesInBlocks) {
  constexpr size_t kBytes = 100000;
  std::string text;
  std::mt19937 random(std::random_device{}());
  while (text.size() < kBytes) text += static_cast<char>(random());
  const std::string framed = Framed(text);
  ReadBlock block{std::make_shared<char[]>(framed.size()), framed.size()};
  std::ranges::copy(framed, block.memory.get());
  const std::weak_ptr<char[]> lives = block.memory;
  MessageAssembler assembler({kBytes});
  std::string_view left(block.memory.get(), block.used_bytes);
  const std::string_view all = left;
  InMessage message;
  bool whole = false;
  for (size_t i = 0; !whole; ++i) {
    std::string_view piece = left.substr(0, i % 3 == 2 ? 100 : 7000);
    left.remove_prefix(piece.size());
    ASSERT_TRUE(assembler.Take(piece, &block, message, whole).ok());
    // Small pieces in between take little more memory than their size.
    ASSERT_LE(assembler.held_bytes(), static_cast<int64_t>(2 * kBytes));
  }
  block.memory.reset();
  EXPECT_TRUE(message.Text() == text);
  size_t referred = 0;
  for (const InMessage::Piece& piece : message.pieces) {
    const bool lies =
        piece.bytes.data() >= all.data() && piece.bytes.data() < all.data() + all.size();
    EXPECT_EQ(lies, piece.bytes.size() >= 2048) << piece.bytes.size();
    referred += lies ? piece.bytes.size() : 0;
  }
  EXPECT_GT(referred, kBytes * 9 / 10);
  EXPECT_EQ(block.referenced_bytes, referred);
  EXPECT_FALSE(lives.expired());
  message.pieces.clear();
  EXPECT_TRUE(lives.expired());
}

TEST(MessageAssembler, RefusesATooLongMessageAtItsLength) {
  MessageAssembler assembler({10, "twice --max"});
  std::vector<std::string> messages;
  EXPECT_TRUE(Cut(assembler, Framed(std::string(10, 'x')), 100, messages).ok());
  const Status status = Cut(assembler, Framed(std::string(11, 'x')).substr(0, 5), 1, messages);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.message(), "a message has 11 bytes, must have at most 10 (twice --max)");
}

TEST(MessageAssembler, RefusesCompressedMessagesAndOtherFlags) {
  std::vector<std::string> messages;
  MessageAssembler compressed({kMost});
  EXPECT_EQ(Cut(compressed, Framed("x", true), 100, messages).code(), Code::kUnimplemented);
  MessageAssembler unknown({kMost});
  EXPECT_EQ(Cut(unknown, "\2", 100, messages).code(), Code::kInternal);
}

// Places for some bytes of a message, far apart.
struct TestPlaces final : MessagePlaces {
  TestPlaces(int64_t message_bytes, std::mt19937& random) {
    for (int64_t at = random() % 1000; at < message_bytes;) {
      const int64_t most = random() % 4 == 0 ? 1 : 200000;  // some places are empty
      const int64_t bytes = std::min<int64_t>(random() % most, message_bytes - at);
      memory.emplace_back(static_cast<size_t>(bytes), '\0');
      places.push_back({at, bytes, nullptr});
      at += bytes + static_cast<int64_t>(random() % 20);
    }
    for (size_t i = 0; i < places.size(); ++i) places[i].to = memory[i].data();
  }
  std::vector<std::string> memory;
};

TEST(MessageAssembler, BytesAreReadIntoTheirPlaces) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20; ++round) {
    std::string text((600 << 10) + random() % 100000, '\0');
    for (char& byte : text) byte = static_cast<char>(random());
    const std::string stream = Framed(text);
    const auto places = std::make_shared<TestPlaces>(std::ssize(text), random);
    MessageAssembler assembler({std::ssize(text)});
    InMessage message;
    bool whole = false;
    for (size_t at = 0; at < stream.size() && !whole;) {
      std::string_view bytes = std::string_view(stream).substr(at, 1 + random() % 50000);
      const std::span<char> room = assembler.Room();
      if (!room.empty() && random() % 2 == 0) {  // they are read there
        bytes = bytes.substr(0, room.size());
        bytes.copy(room.data(), bytes.size());
        bytes = {room.data(), bytes.size()};
      }
      at += bytes.size();
      ASSERT_TRUE(assembler.Take(bytes, nullptr, message, whole).ok());
      ASSERT_TRUE(bytes.empty());
      if (!whole && assembler.MayPlace()) assembler.Place(places);
    }
    ASSERT_TRUE(whole);
    EXPECT_TRUE(message.Text() == text);
    EXPECT_EQ(message.places, places);
    const auto first = static_cast<int64_t>(message.pieces.front().bytes.size());
    for (const MessagePlaces::Place& place : places->places) {
      if (place.begin < first) continue;
      EXPECT_EQ(std::string_view(place.to, place.bytes),
                std::string_view(text).substr(place.begin, place.bytes));
    }
    EXPECT_LE(message.pieces.size(), 2 * places->places.size() + 2);
    EXPECT_TRUE(assembler.Room().empty());
  }
}

TEST(MessageAssembler, AsksForPlacesOnceForALargeMessage) {
  const std::string large = Framed(std::string(600 << 10, 'l'));
  const std::string small = Framed(std::string(100 << 10, 's'));
  MessageAssembler assembler({1 << 20});
  InMessage message;
  bool whole = false;
  const auto take = [&](std::string_view bytes) {
    EXPECT_TRUE(assembler.Take(bytes, nullptr, message, whole).ok());
    return assembler.MayPlace();
  };
  for (int round = 0; round < 2; ++round) {
    EXPECT_FALSE(take(large.substr(0, 5)));
    EXPECT_TRUE(take(large.substr(5, 1)));
    assembler.Place(nullptr);
    EXPECT_FALSE(take(large.substr(6, 1000)));
    EXPECT_FALSE(take(large.substr(1006)));
    EXPECT_TRUE(whole);
    EXPECT_FALSE(take(small.substr(0, 50)));
    EXPECT_FALSE(take(small.substr(50)));
    EXPECT_TRUE(whole);
  }
  const auto places = std::make_shared<MessagePlaces>();
  EXPECT_TRUE(take(large.substr(0, 6)));
  assembler.Place(places);
  assembler.Drop();
  EXPECT_EQ(places.use_count(), 1);
}

}  // namespace
}  // namespace attend

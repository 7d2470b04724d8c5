// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "server/wire/chunk_codec.h"
#include "tests/kernels/support/problems.h"
#include "tests/server/support/message_pieces.h"
#include "tests/server/support/messages.h"

namespace attend {
namespace {

std::string Copied(const ChunkMessage& chunk) {
  std::string to(static_cast<size_t>(chunk.bytes()), '\0');
  size_t copied = 0;
  for (const HostPiece& piece : chunk.Pieces(to.data())) {
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
    copied += static_cast<size_t>(piece.bytes);
  }
  EXPECT_EQ(copied, to.size());
  return to;
}

TEST(ChunkMessageTest, ReadsAChunkWithFieldsInAnyOrder) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 300; ++round) {
    v1::AttendChunkedRequest message;
    message.set_tensor(static_cast<v1::TensorName>(random() % 5));
    message.set_offset(random() >> (random() % 64));
    message.set_data(std::string(1 + random() % 500, static_cast<char>(random())));
    std::string bytes = message.SerializeAsString();
    if (round % 3 == 1) bytes = test::Shuffled(bytes, random);
    // an unknown field after the others
    if (round % 3 == 2) bytes += std::string("\x98\x06\x01", 3);
    ChunkMessage chunk;
    ASSERT_TRUE(chunk.Take(test::InPieces(bytes, random, 40), 1024).ok());
    const Status status = chunk.ParseChunk(kChunkBytesMax);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(chunk.tensor(), message.tensor());
    EXPECT_EQ(chunk.offset(), message.offset());
    EXPECT_EQ(Copied(chunk), message.data());
    EXPECT_EQ(chunk.message_bytes(), static_cast<int64_t>(bytes.size()));
  }
}

TEST(ChunkMessageTest, BrokenMessagesAreRefusedAndNeverReadBeyond) {
  const uint64_t seed = test::FreshSeed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  v1::AttendChunkedRequest message;
  message.set_tensor(v1::TENSOR_NAME_V);
  message.set_offset(1 << 20);
  message.set_data("some bytes");
  const std::string whole = message.SerializeAsString();
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    ChunkMessage chunk;
    ASSERT_TRUE(chunk.Take(test::InPieces(whole.substr(0, cut), random, 40), 1024).ok());
    EXPECT_EQ(chunk.ParseChunk(kChunkBytesMax).code(), Code::kInvalidArgument) << cut;
  }
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = whole;
    for (uint64_t flips = 1 + random() % 3; flips > 0; --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    ChunkMessage chunk;
    ASSERT_TRUE(chunk.Take(test::InPieces(bytes, random, 40), 1024).ok());
    v1::AttendChunkedRequest generated;
    const bool valid = generated.ParseFromString(bytes);
    const Status status = chunk.ParseChunk(kChunkBytesMax);
    if (status.ok()) {
      ASSERT_TRUE(valid);
      EXPECT_EQ(chunk.tensor(), generated.tensor());
      EXPECT_EQ(chunk.offset(), generated.offset());
      EXPECT_EQ(Copied(chunk), generated.data());
    }
  }
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Assembly of an answer from chunks: any order of its messages, and refusals.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "client/call/random.h"
#include "client/wire/chunk_codec.h"
#include "tests/client/support/chunked_calls.h"
#include "tests/client/support/test_seed.h"

namespace attend::client {
namespace {

using ::testing::HasSubstr;

TEST(ByteRanges, AcceptsEachByteOnceInAnyOrder) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    ByteRanges ranges;
    std::vector<bool> came(50);
    for (int i = 0; i < 60; ++i) {
      const auto begin = static_cast<int64_t>(random.Below(50));
      const auto bytes = static_cast<int64_t>(random.Below(static_cast<uint64_t>(51 - begin)) / 4);
      const auto from = came.begin() + begin;
      const bool fresh = std::find(from, from + bytes, true) == from + bytes;
      ASSERT_EQ(ranges.Add(begin, bytes), fresh) << begin << " + " << bytes;
      if (fresh) std::fill(from, from + bytes, true);
    }
  }
}

TEST(ChunkedCall, PiecesContainEachByteOnce) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  const auto call = ChunkedCall::Make(RandomCall("B2,H3,L700,D64,lse", 1), nullptr);
  ASSERT_TRUE(call.ok());
  for (int round = 0; round < 20; ++round) {
    const auto bytes_max = static_cast<int64_t>(1 + random.Below(uint64_t{4} << 20));
    ChunkedCall::Piece piece;
    int64_t bytes = 0;
    for (ChunkedCall::Piece last; call->Next(bytes_max, &piece); last = piece) {
      const bool same = piece.tensor == last.tensor;
      ASSERT_TRUE(same || piece.tensor == last.tensor + 1);
      ASSERT_EQ(piece.offset, same ? last.offset + last.bytes : 0);
      ASSERT_GT(piece.bytes, 0);
      ASSERT_LE(piece.bytes, std::min(bytes_max, ChunkedCall::kPieceBytes));
      bytes += piece.bytes;
    }
    EXPECT_EQ(bytes, call->payload_bytes());
    EXPECT_FALSE(call->Next(bytes_max, &piece)) << "they are over for good";
  }
}

// O is [1, 2, 5, 8], 320 bytes; the LSE [1, 2, 5], 40.
constexpr int64_t kBytesO = 320;
constexpr int64_t kBytesLse = 40;

std::shared_ptr<const ChunkedCall> CallOf(const char* text) {
  return std::make_shared<const ChunkedCall>(
      std::move(*ChunkedCall::Make(RandomCall(text, 1), nullptr)));
}
std::shared_ptr<const ChunkedCall> WithLse() { return CallOf("B1,H2,L5,D8,lse"); }

v1::AttendChunkedResponse HeaderWithLse(std::initializer_list<int64_t> shape = {1, 2, 5}) {
  v1::AttendChunkedResponse message = Header({1, 2, 5, 8});
  v1::Tensor* lse = message.mutable_response()->mutable_lse();
  lse->set_dtype(v1::DTYPE_FLOAT32);
  for (const int64_t dim : shape) lse->add_shape(dim);
  message.mutable_response()->set_kernel("the kernel");
  return message;
}

Status Take(ChunkedAnswer& answer, const v1::AttendChunkedResponse& message) {
  const grpc::Slice slice(message.SerializeAsString());
  grpc::ByteBuffer buffer(&slice, 1);
  std::optional<v1::ChunkedGrant> grant;
  const Status status = answer.Take(&buffer, &grant);
  EXPECT_FALSE(grant);
  return status;
}

// Cut at random places.
void AppendChunks(int tensor, const std::string& bytes, Random& random,
                  std::vector<v1::AttendChunkedResponse>* messages) {
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = std::min(bytes.size() - at, static_cast<size_t>(1 + random.Below(100)));
    v1::AttendChunkedResponse message = Data(tensor, at, 0);
    message.set_data(bytes.substr(at, size));
    messages->push_back(std::move(message));
    at += size;
  }
}

std::string RandomBytes(int64_t bytes, Random& random) {
  std::string text(static_cast<size_t>(bytes), '\0');
  for (char& c : text) c = static_cast<char>(random.Below(256));
  return text;
}

bool Holds(const HostTensor& tensor, const std::string& bytes) {
  return tensor.bytes == static_cast<int64_t>(bytes.size()) &&
         std::memcmp(tensor.data.get(), bytes.data(), bytes.size()) == 0;
}

TEST(ChunkedAnswer, MessagesMayComeInAnyOrder) {
  ATTEND_FRESH_SEED(seed);
  Random random(seed);
  for (int round = 0; round < 200; ++round) {
    const Payload payload = random.Below(4) == 0 ? Payload::kDiscard : Payload::kCopy;
    const std::string o = RandomBytes(kBytesO, random);
    const std::string lse = RandomBytes(kBytesLse, random);
    std::vector<v1::AttendChunkedResponse> messages = {HeaderWithLse()};
    AppendChunks(v1::TENSOR_NAME_O, o, random, &messages);
    AppendChunks(v1::TENSOR_NAME_LSE, lse, random, &messages);
    for (size_t i = messages.size() - 1; i > 0; --i) {
      std::swap(messages[i],
                messages[static_cast<size_t>(random.Below(static_cast<int64_t>(i) + 1))]);
    }
    ChunkedAnswer answer(WithLse(), payload);
    for (const v1::AttendChunkedResponse& message : messages) {
      EXPECT_FALSE(answer.complete());
      const Status status = Take(answer, message);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    ASSERT_TRUE(answer.complete());
    const DecodedResponse response = answer.TakeResponse();
    EXPECT_EQ(response.payload_bytes, kBytesO + kBytesLse);
    EXPECT_EQ(response.result.kernel, "the kernel");
    EXPECT_EQ(response.result.o.shape, (std::vector<int64_t>{1, 2, 5, 8}));
    ASSERT_TRUE(response.result.lse.has_value());
    EXPECT_EQ(response.result.lse->shape, (std::vector<int64_t>{1, 2, 5}));
    if (payload == Payload::kCopy) {
      EXPECT_TRUE(Holds(response.result.o, o));
      EXPECT_TRUE(Holds(*response.result.lse, lse));
    } else {
      EXPECT_EQ(response.result.o.data, nullptr);
      EXPECT_EQ(response.result.lse->data, nullptr);
      EXPECT_EQ(response.result.o.bytes, kBytesO);
    }
  }
}

TEST(ChunkedAnswer, AnEmptyAnswerIsOnlyAHeader) {
  ChunkedAnswer answer(CallOf("B1,H1,Lq0,Lk5,D8"), Payload::kCopy);
  EXPECT_FALSE(answer.complete());
  ASSERT_TRUE(Take(answer, Header({1, 1, 0, 8})).ok());
  EXPECT_TRUE(answer.complete());
  const DecodedResponse response = answer.TakeResponse();
  EXPECT_EQ(response.payload_bytes, 0);
  EXPECT_FALSE(response.result.lse.has_value());
}

TEST(ChunkedAnswer, InconsistentChunksAreRefusedBeforeAndAfterTheHeader) {
  struct Case {
    v1::AttendChunkedResponse message;
    const char* told;
  };
  const Case cases[] = {
      {Data(v1::TENSOR_NAME_O, 1, kBytesO), "not within the tensor's 320"},
      {Data(v1::TENSOR_NAME_O, UINT64_MAX, 2), "not within the tensor's 320"},
      {Data(v1::TENSOR_NAME_LSE, 37, 4), "not within the tensor's 40"},
      {Data(v1::TENSOR_NAME_Q, 0, 1), "a chunk of tensor 1 at offset 0 with 1 bytes is not within"},
      {Data(v1::TENSOR_NAME_UNSPECIFIED, 0, 1), "not within the tensor's 0"},
      {Data(INT32_MIN, 0, 1), "not within the tensor's 0"},
      {Data(v1::TENSOR_NAME_LSE, 7, 4), "bytes of tensor 6 in [7, 11) came twice"},
  };
  for (const Payload payload : {Payload::kCopy, Payload::kDiscard}) {
    for (const bool header_first : {false, true}) {
      for (const Case& each : cases) {
        ChunkedAnswer answer(WithLse(), payload);
        if (header_first) {
          ASSERT_TRUE(Take(answer, HeaderWithLse()).ok());
        }
        ASSERT_TRUE(Take(answer, Data(v1::TENSOR_NAME_LSE, 0, 8)).ok());
        const Status status = Take(answer, each.message);
        EXPECT_EQ(status.code(), Code::kInternal) << each.told;
        EXPECT_THAT(status.message(), HasSubstr(each.told));
      }
    }
  }
}

TEST(ChunkedAnswer, AnUnrequestedLseIsRefused) {
  ChunkedAnswer answer(CallOf("B1,H2,L5,D8"), Payload::kCopy);
  EXPECT_THAT(Take(answer, Data(v1::TENSOR_NAME_LSE, 0, 4)).message(),
              HasSubstr("not within the tensor's 0"));
  EXPECT_THAT(Take(answer, HeaderWithLse()).message(), HasSubstr("an lse, but none was requested"));
}

TEST(ChunkedAnswer, HeadersMustMatchTheCall) {
  v1::AttendChunkedResponse half = HeaderWithLse();
  half.mutable_response()->mutable_lse()->set_dtype(v1::DTYPE_FLOAT16);
  v1::AttendChunkedResponse no_dtype = HeaderWithLse();
  no_dtype.mutable_response()->mutable_o()->clear_dtype();
  v1::AttendChunkedResponse other = HeaderWithLse();
  other.mutable_response()->mutable_o()->set_shape(2, 6);
  const std::pair<v1::AttendChunkedResponse, const char*> cases[] = {
      {Header({1, 2, 5, 8}), "it has no lse, but one was requested"},
      {HeaderWithLse({1, 2, 6}), "lse is float32 [1, 2, 6], must be float32 [1, 2, 5]"},
      {half, "lse is float16 [1, 2, 5], must be float32"},
      {no_dtype, "o has dtype 0"},
      {other, "o is float32 [1, 2, 6, 8], must be float32 [1, 2, 5, 8]"},
  };
  for (const bool chunk_first : {false, true}) {
    for (const auto& [message, told] : cases) {
      ChunkedAnswer answer(WithLse(), Payload::kCopy);
      if (chunk_first) {
        ASSERT_TRUE(Take(answer, Data(v1::TENSOR_NAME_O, 0, kBytesO)).ok());
      }
      const Status status = Take(answer, message);
      EXPECT_EQ(status.code(), Code::kInternal) << told;
      EXPECT_THAT(status.message(), HasSubstr(told));
      EXPECT_FALSE(answer.complete());
    }
  }
}

TEST(ChunkedAnswer, ASecondHeaderIsRefused) {
  ChunkedAnswer answer(WithLse(), Payload::kCopy);
  ASSERT_TRUE(Take(answer, Data(v1::TENSOR_NAME_O, 0, 9)).ok());
  ASSERT_TRUE(Take(answer, HeaderWithLse()).ok());
  EXPECT_THAT(Take(answer, HeaderWithLse()).message(), HasSubstr("a second header"));
}

}  // namespace
}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// How Validate treats dropout and a mask of bits. For refusals see bad_requests.cc.

#include "server/wire/validate.h"

#include <gtest/gtest.h>

#include "server/wire/request_codec.h"
#include "tests/server/support/messages.h"

namespace attend {
namespace {

Status Judge(const v1::AttendRequest& request, Validated& validated) {
  const test::Pieces pieces(request.SerializeAsString());
  google::protobuf::Arena arena;
  RequestMessage message;
  message.slices = pieces.spans();
  ATTEND_RETURN_IF_ERROR(ScanMessage(message.slices, message.scan));
  ATTEND_RETURN_IF_ERROR(ParseMessage(arena, message));
  return Validate(*message.fields, message.arrays(), validated);
}

TEST(ValidateTest, DropoutIsRoundedToSteps) {
  for (const auto& [p, steps] :
       {std::pair{0.0f, 0}, std::pair{0.1f, 6554}, std::pair{0.5f, 32768}, std::pair{0x1p-18f, 0},
        std::pair{0x1.8p-17f, 1}, std::pair{1 - 0x1.8p-17f, 65535}}) {
    v1::AttendRequest request = test::PlainWireProblem(1).request;
    request.set_dropout_p(p);
    request.set_dropout_seed(~uint64_t{0});
    Validated validated;
    const Status status = Judge(request, validated);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(validated.attention.problem.dropout, steps) << p;
    EXPECT_EQ(validated.attention.dropout.seed, ~uint64_t{0});
  }
}

TEST(ValidateTest, RowsOfBitsBeginOnBytes) {
  for (const auto& [length, row_bytes] :
       {std::pair{1, 1}, std::pair{8, 1}, std::pair{11, 2}, std::pair{17, 3}}) {
    v1::AttendRequest request = test::PlainWireProblem(1, length).request;
    request.mutable_bias()->set_dtype(v1::DTYPE_BIT);
    for (const int dim : {1, 2, length, length}) request.mutable_bias()->add_shape(dim);
    request.mutable_bias()->set_byte_length(static_cast<uint64_t>(2 * length * row_bytes));
    Validated validated;
    const Status status = Judge(request, validated);
    ASSERT_TRUE(status.ok()) << status.ToString();
    const BiasView& bias = validated.attention.bias;
    EXPECT_EQ(bias.dtype, DType::kBit);
    EXPECT_TRUE(validated.attention.problem.bias_bits);
    EXPECT_EQ(validated.tensor_bytes[3], 2 * length * row_bytes);
    EXPECT_EQ(bias.stride_q, length == 1 ? 0 : 8 * row_bytes);
    EXPECT_EQ(bias.stride_h, 8 * row_bytes * length);
    EXPECT_EQ(bias.stride_b, 0);
  }
}

TEST(ValidateTest, TheProblemKnowsWhetherTheBiasHasQsDType) {
  for (const v1::DType dtype : {v1::DTYPE_FLOAT16, v1::DTYPE_BFLOAT16, v1::DTYPE_FLOAT32}) {
    v1::AttendRequest request = test::PlainWireProblem(1, 8).request;
    request.mutable_bias()->set_dtype(dtype);
    for (const int dim : {1, 1, 1, 8}) request.mutable_bias()->add_shape(dim);
    request.mutable_bias()->set_byte_length(dtype == v1::DTYPE_FLOAT32 ? 32 : 16);
    Validated validated;
    const Status status = Judge(request, validated);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_EQ(validated.attention.problem.bias_as_q, dtype == request.q().dtype());
    EXPECT_FALSE(validated.attention.problem.bias_bits);
  }
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <string>

#include "server/wire/grpc_status.h"

namespace attend {
namespace {

TEST(GrpcStatusTest, EveryCodeThereAndBack) {
  EXPECT_TRUE(ToGrpc(Status()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status()).ok());
  for (const Code code :
       {Code::kCancelled, Code::kUnknown, Code::kInvalidArgument, Code::kDeadlineExceeded,
        Code::kNotFound, Code::kAlreadyExists, Code::kPermissionDenied, Code::kResourceExhausted,
        Code::kFailedPrecondition, Code::kOutOfRange, Code::kUnimplemented, Code::kInternal,
        Code::kUnavailable}) {
    const grpc::Status there = ToGrpc(Status(code, "why"));
    EXPECT_EQ(static_cast<int>(there.error_code()), static_cast<int>(code));
    const Status back = FromGrpc(there);
    EXPECT_EQ(back.code(), code);
    EXPECT_EQ(back.message(), "why");
  }
  const Status foreign = FromGrpc(grpc::Status(grpc::StatusCode::ABORTED, "race"));
  EXPECT_EQ(foreign.code(), Code::kUnknown);
  EXPECT_NE(foreign.message().find("race"), std::string::npos);
}

TEST(GrpcStatusTest, LongMessagesAreCutBetweenCharacters) {
  EXPECT_EQ(CutMessage(std::string(1024, 'x')), std::string(1024, 'x'));
  EXPECT_EQ(CutMessage(std::string(1025, 'x')), std::string(1021, 'x').append("..."));
  std::string umlauts;  // two bytes each, so that 1021 falls into one
  for (int i = 0; i < 600; ++i) umlauts += "\xc3\xa4";
  const std::string cut = CutMessage(umlauts);
  EXPECT_EQ(cut, umlauts.substr(0, 1020) + "...");
}

}  // namespace
}  // namespace attend

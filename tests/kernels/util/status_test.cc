// SPDX-License-Identifier: Apache-2.0

#include "kernels/util/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

namespace attend {
namespace {

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.ToString(), "OK");
}

TEST(Status, CarriesCodeAndMessage) {
  const Status status = InvalidArgument("dim is 0");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "dim is 0");
  EXPECT_EQ(status.ToString(), "INVALID_ARGUMENT: dim is 0");
  EXPECT_EQ(Unimplemented("x").code(), Code::kUnimplemented);
  EXPECT_EQ(ResourceExhausted("x").code(), Code::kResourceExhausted);
  EXPECT_EQ(Unavailable("x").code(), Code::kUnavailable);
  EXPECT_EQ(Internal("x").code(), Code::kInternal);
}

TEST(Status, CodesHaveUniqueNamesAndGrpcsNumbers) {
  std::set<std::string_view> names;
  constexpr Code kAll[] = {Code::kOk,
                           Code::kCancelled,
                           Code::kUnknown,
                           Code::kInvalidArgument,
                           Code::kDeadlineExceeded,
                           Code::kNotFound,
                           Code::kAlreadyExists,
                           Code::kPermissionDenied,
                           Code::kResourceExhausted,
                           Code::kFailedPrecondition,
                           Code::kUnimplemented,
                           Code::kInternal,
                           Code::kUnavailable};
  for (const Code code : kAll) names.insert(CodeName(code));
  EXPECT_EQ(names.size(), std::size(kAll));
  EXPECT_EQ(static_cast<int>(Code::kInvalidArgument), 3);
  EXPECT_EQ(static_cast<int>(Code::kResourceExhausted), 8);
  EXPECT_EQ(static_cast<int>(Code::kUnavailable), 14);
  EXPECT_EQ(CodeName(static_cast<Code>(99)), "UNKNOWN");
}

Status FailIf(bool fail) {
  ATTEND_RETURN_IF_ERROR(fail ? Internal("first") : Status());
  return Unavailable("second");
}

TEST(Status, ReturnIfErrorReturnsOnlyErrors) {
  EXPECT_EQ(FailIf(true).message(), "first");
  EXPECT_EQ(FailIf(false).message(), "second");
}

TEST(Result, HoldsValueOrStatus) {
  Result<int> value(7);
  ASSERT_TRUE(value.ok());
  EXPECT_TRUE(value.status().ok());
  EXPECT_EQ(*value, 7);
  *value = 8;
  EXPECT_EQ(value.value(), 8);

  const Result<int> error(Internal("broken"));
  EXPECT_FALSE(error.ok());
  EXPECT_EQ(error.status().message(), "broken");
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(5));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(**result, 5);
  const std::unique_ptr<int> out = std::move(result).value();
  EXPECT_EQ(*out, 5);
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Exceptions inside the C interface are returned as a code and a message.

#include "client/c/status.h"

#include <gtest/gtest.h>

#include <new>
#include <string>
#include <system_error>

#include "client/c/attend_client.h"

namespace attend::client::c {
namespace {

TEST(AttendClientCStatus, ExceptionsBecomeStatuses) {
  EXPECT_EQ(c::Run([] { return InvalidArgument("bytes is -1"); }), 3);
  EXPECT_STREQ(attend_client_last_error(), "bytes is -1");
  EXPECT_EQ(c::Run([]() -> Status { throw std::bad_alloc(); }), 8);
  EXPECT_STREQ(attend_client_last_error(), "out of memory");
  EXPECT_EQ(c::Run([]() -> Status {
              throw std::system_error(
                  std::make_error_code(std::errc::resource_unavailable_try_again), "a thread");
            }),
            13);
  EXPECT_NE(std::string(attend_client_last_error()).find("a thread"), std::string::npos);
  EXPECT_EQ(c::Run([] { return Status(); }), 0);
}

}  // namespace
}  // namespace attend::client::c

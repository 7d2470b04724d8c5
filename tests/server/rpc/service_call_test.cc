// SPDX-License-Identifier: Apache-2.0
//
// The end of calls with one small message in each direction.

#include "server/rpc/service_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/server/support/context_fixture.h"
#include "tests/server/support/silent_call.h"

namespace attend {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ServiceCallTest : public test::ContextTest {
 protected:
  // The end of a call of the method that runs out of memory, over a socket that is bound to a
  // tenant.
  Status Call(const ServiceMethod& method) {
    const std::string name = "/a.B/C";
    const ServiceCall::Answer answer = [](ServiceCall&, Refusal&) { return OutOfMemory(); };
    test::SilentCall call(name, "", {.address = "unix:7", .local = true, .tenant = 0});
    return call.Answer(*SmallCall::Begin<ServiceCall>(call, context_, method, name, answer), "");
  }
};

TEST_F(ServiceCallTest, CallsRefusedForMemoryAreInTheAuditLog) {
  EXPECT_EQ(Call({.event = "call failed", .audit = "admin call"}).code(), Code::kResourceExhausted);
  EXPECT_THAT(log_.str(),
              AllOf(HasSubstr("admin call"), HasSubstr("/a.B/C"), HasSubstr("RESOURCE_EXHAUSTED"),
                    HasSubstr("caller=\"unix\""), HasSubstr("unix:7")));
}

TEST_F(ServiceCallTest, OtherCallsAreLoggedIfTheyFail) {
  const ServiceMethod method{.event = "call failed"};
  EXPECT_THAT(log_.str(), IsEmpty());
  EXPECT_FALSE(Call(method).ok());
  EXPECT_THAT(log_.str(), AllOf(HasSubstr("call failed"), Not(HasSubstr("admin call"))));
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The end of calls with one small message in each direction.

#include "server/rpc/service_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/server/support/context_fixture.h"

namespace attend {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class NoWire final : public WireCall {
 public:
  std::string Peer() const override { return "unix:7"; }
  bool Encrypted() const override { return false; }
  bool HasCertificate() const override { return false; }
  std::vector<Credentials::Name> CertificateNames() const override { return {}; }
  int Find(std::string_view, std::string_view&) const override { return 0; }
  TimePoint Deadline() const override { return kNever; }
  bool Cancelled() const override { return false; }
  void AddInitialMetadata(std::string_view, std::string_view) const override {}
  void AddTrailingMetadata(std::string_view, std::string_view) const override {}
  void Cancel() const override {}
};

class ServiceCallTest : public test::ContextTest {
 protected:
  // Ends a call of the method as if memory had run out.
  void End(const ServiceMethod& method, const Status& status) {
    CallFacts facts;
    facts.method = "/a.B/C";
    facts.caller.name = std::make_shared<const std::string>("boss");
    ServiceCall::Wire wire{std::make_shared<NoWire>(), &request_, &response_,
                           [this](const Status& told) { told_ = told; }};
    ServiceCall(context_, method, facts, std::move(wire)).End(status);
  }

  std::string request_, response_;
  Status told_;
};

TEST_F(ServiceCallTest, CallsRefusedForMemoryAreInTheAuditLog) {
  End({.event = "call failed", .audit = "admin call"}, OutOfMemory());
  EXPECT_EQ(told_.code(), Code::kResourceExhausted);
  EXPECT_THAT(log_.str(),
              AllOf(HasSubstr("admin call"), HasSubstr("/a.B/C"), HasSubstr("RESOURCE_EXHAUSTED"),
                    HasSubstr("boss"), HasSubstr("unix:7")));
}

TEST_F(ServiceCallTest, OtherCallsAreLoggedIfTheyFail) {
  const ServiceMethod method{.event = "call failed"};
  End(method, Status());
  EXPECT_THAT(log_.str(), IsEmpty());
  End(method, OutOfMemory());
  EXPECT_THAT(log_.str(), AllOf(HasSubstr("call failed"), Not(HasSubstr("admin call"))));
}

}  // namespace
}  // namespace attend

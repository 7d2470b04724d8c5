// SPDX-License-Identifier: Apache-2.0

#include "server/sessions/leases.h"

#include <gtest/gtest.h>

#include <chrono>

namespace attend {
namespace {

using std::chrono::seconds;

class LeasesTest : public ::testing::Test {
 protected:
  LeasesTest() {
    brief_.lease = seconds(10);
    lasting_.lease = seconds(30);
    leases_.Begin(lasting_, now_);
    leases_.Begin(brief_, now_);
  }
  ~LeasesTest() override { EXPECT_TRUE(leases_.Consistent()); }

  const TimePoint now_ = TimePoint(seconds(1000));
  Session brief_, lasting_;
  Leases leases_;
};

TEST_F(LeasesTest, TheLeaseThatEndsFirstIsDueFirst) {
  EXPECT_EQ(leases_.Due(now_ + seconds(9)), nullptr);
  EXPECT_EQ(leases_.Due(now_ + seconds(10)), &brief_);
  EXPECT_TRUE(Leases::Over(brief_, now_ + seconds(10)));
  leases_.End(brief_);
  EXPECT_EQ(leases_.Due(now_ + seconds(29)), nullptr);
  EXPECT_EQ(leases_.Due(now_ + seconds(30)), &lasting_);
  EXPECT_EQ(leases_.count(), 1);
}

TEST_F(LeasesTest, AUseRenewsTheLease) {
  leases_.Renew(brief_, now_ + seconds(9));
  EXPECT_EQ(leases_.Due(now_ + seconds(18)), nullptr);
  EXPECT_FALSE(Leases::Over(brief_, now_ + seconds(18)));
  EXPECT_EQ(leases_.Due(now_ + seconds(19)), &brief_);
}

TEST_F(LeasesTest, ASessionInUseIsCheckedAgainLater) {
  ++brief_.in_use;
  const TimePoint end = now_ + seconds(10);
  EXPECT_EQ(leases_.Due(end), &brief_);
  EXPECT_FALSE(Leases::Over(brief_, end));
  leases_.LookAgain(brief_, end + seconds(1));
  EXPECT_EQ(leases_.Due(end), nullptr);
  --brief_.in_use;
  EXPECT_TRUE(Leases::Over(brief_, end)) << "whenever it is looked at";
  EXPECT_EQ(leases_.Due(end + seconds(1)), &brief_);
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/load_report.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tests/kernels/support/manual_clock.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Output of protoc --encode=xds.data.orca.v3.OrcaLoadReport.
TEST(LoadReportTest, EncodesAsProtobufDoes) {
  const std::string rps("\x31\x00\x00\x00\x00\x00\x00\xf8\x3f", 9);          // 6: 1.5
  const std::string utilization("\x49\x00\x00\x00\x00\x00\x00\xd0\x3f", 9);  // 9: 0.25
  EXPECT_EQ((LoadReport{.utilization = 0.25, .requests_per_s = 1.5}).Encode(), rps + utilization);
  EXPECT_EQ((LoadReport{.requests_per_s = 1.5}).Encode(), rps);
  EXPECT_EQ(LoadReport().Encode(), "");
}

class LoadMeterTest : public ::testing::Test {
 protected:
  test::ManualClock clock_;
  LoadMeter::Totals totals_{.answered = 1000, .busy = seconds(77), .lanes = 4};
  int asked_ = 0;
  LoadMeter meter_{[this] { return ++asked_, totals_; }, clock_};
};

TEST_F(LoadMeterTest, AveragesOverASecond) {
  totals_.answered += 30;
  totals_.busy += seconds(1);
  clock_.Advance(milliseconds(999));
  EXPECT_EQ(meter_.Report(), "") << "not yet a second";
  clock_.Advance(milliseconds(1));
  const std::string first = LoadReport{.utilization = 0.25, .requests_per_s = 30}.Encode();
  EXPECT_EQ(meter_.Report(), first);
  totals_.answered += 5;
  clock_.Advance(milliseconds(999));
  EXPECT_EQ(meter_.Report(), first) << "the last whole second's";
  EXPECT_EQ(asked_, 2);
  clock_.Advance(milliseconds(1501));
  EXPECT_EQ(meter_.Report(), (LoadReport{.utilization = 0, .requests_per_s = 2}.Encode()));
}

TEST_F(LoadMeterTest, ALostDeviceDoesNotMakeTheLoadNegative) {
  totals_.answered += 10;
  totals_.busy = seconds(1);
  totals_.lanes = 2;
  clock_.Advance(seconds(1));
  EXPECT_EQ(meter_.Report(), (LoadReport{.requests_per_s = 10}.Encode()));
  totals_.busy += seconds(1);
  totals_.lanes = 0;
  clock_.Advance(seconds(1));
  EXPECT_EQ(meter_.Report(), "");
}

}  // namespace
}  // namespace attend

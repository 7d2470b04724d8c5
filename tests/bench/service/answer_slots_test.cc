// SPDX-License-Identifier: Apache-2.0

#include "tests/bench/service/answer_slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/service/engine_slots.h"

namespace attend::bench {
namespace {

using ::testing::HasSubstr;

class AnswerSlotsTest : public ::testing::Test {
 protected:
  // O has 32 KiB; only the marks at its beginning are checked, so that nothing has to be computed.
  AnswerSlotsTest()
      : work_("w", test::MakeSpec(1, 4, 1, 64, 16, 32, 32), Truth::kMarks, 5),
        right_(static_cast<size_t>(work_.output_bytes()), 'x') {
    const Attention& a = work_.owned().attention;
    right_.replace(0, 16, static_cast<const char*>(a.q.data), 16);
    right_.replace(16, 16, static_cast<const char*>(a.k.data), 16);
    right_.replace(32, 16, static_cast<const char*>(a.v.data), 16);
  }

  // A slot for each device name, with correct answers; from call `end` on nothing is written.
  AnswerSlots Slots(std::vector<std::string> names, int devices, int64_t end = 1'000'000'000) {
    calls_ = 0;
    std::vector<Slot> slots;
    for (const std::string& name : names) {
      char* const o = places_.emplace_back(std::make_unique<char[]>(right_.size())).get();
      slots.push_back({o, [this, o, name, end]() -> Result<std::string> {
                         if (++calls_ < end) std::memcpy(o, right_.data(), right_.size());
                         return name;
                       }});
    }
    return AnswerSlots(work_, std::move(slots), devices);
  }

  const Work work_;
  std::string right_;
  std::vector<std::unique_ptr<char[]>> places_;
  std::atomic<int64_t> calls_ = 0;
};

TEST_F(AnswerSlotsTest, CountsTheCallsOfAllSlots) {
  AnswerSlots slots = Slots({"a", "a", "b"}, 2);
  ASSERT_TRUE(slots.Check().ok());
  EXPECT_EQ(calls_, 3);
  const Result<Sample> sample = slots.Drive(0.01);
  ASSERT_TRUE(sample.ok()) << sample.status().ToString();
  EXPECT_EQ(sample->calls, calls_ - 3);
  EXPECT_GE(sample->calls, 3);
  EXPECT_EQ(sample->bytes, sample->calls * (work_.input_bytes() + work_.output_bytes()));
}

TEST_F(AnswerSlotsTest, AStaleRightAnswerDoesNotHideAMissingOne) {
  AnswerSlots never = Slots({"a"}, 1, 1);
  EXPECT_FALSE(never.Check().ok());
  AnswerSlots at_first = Slots({"a"}, 1, 5);
  ASSERT_TRUE(at_first.Check().ok());
  EXPECT_THAT(at_first.Drive(0.05).status().ToString(), HasSubstr("did not reach"));
  AnswerSlots until_the_end = Slots({"a", "a"}, 1, 4);
  ASSERT_TRUE(until_the_end.Check().ok());
  EXPECT_FALSE(until_the_end.Check().ok());
}

TEST_F(AnswerSlotsTest, AnUnusedDeviceIsAnError) {
  const auto drive = [this](std::vector<std::string> names) {
    AnswerSlots slots = Slots(std::move(names), 2);
    const Status checked = slots.Check();
    return checked.ok() ? slots.Drive(0.001).status() : checked;
  };
  EXPECT_TRUE(drive({"a", "b"}).ok());
  EXPECT_THAT(drive({"a", "a"}).ToString(), HasSubstr("1 of 2 devices"));
}

TEST(EngineSlotsTest, AnEngineAnswersInItsOwnMemory) {
  const Work work("w", test::MakeSpec(1, 4, 1, 70, 70, 32, 32), Truth::kAttention, 5);
  Result<std::unique_ptr<AnswerSlots>> slots = MakeEngineSlots("cpu", 1, work, 3);
  ASSERT_TRUE(slots.ok()) << slots.status().ToString();
  ASSERT_TRUE((*slots)->Check().ok());
  const Result<Sample> sample = (*slots)->Drive(0.02);
  ASSERT_TRUE(sample.ok()) << sample.status().ToString();
  EXPECT_GE(sample->calls, 3);
  EXPECT_TRUE((*slots)->Check().ok());
}

}  // namespace
}  // namespace attend::bench

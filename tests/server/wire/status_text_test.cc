// SPDX-License-Identifier: Apache-2.0

#include "server/wire/status_text.h"

#include <gtest/gtest.h>

#include <string>

namespace attend {
namespace {

TEST(StatusTextTest, LongMessagesAreCutBetweenCharacters) {
  EXPECT_EQ(CutMessage(std::string(1024, 'x')), std::string(1024, 'x'));
  EXPECT_EQ(CutMessage(std::string(1025, 'x')), std::string(1021, 'x').append("..."));
  std::string umlauts;  // two bytes each, so that byte 1021 is in the middle of one
  for (int i = 0; i < 600; ++i) umlauts += "\xc3\xa4";
  const std::string cut = CutMessage(umlauts);
  EXPECT_EQ(cut, umlauts.substr(0, 1020) + "...");
}

}  // namespace
}  // namespace attend

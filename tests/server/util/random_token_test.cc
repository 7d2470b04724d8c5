// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "server/util/random_token.h"

namespace attend {
namespace {

TEST(TokenTest, TokensDiffer) {
  std::set<std::string> tokens;
  for (int i = 0; i < 1000; ++i) {
    const Result<std::string> token = RandomToken();
    ASSERT_TRUE(token.ok());
    EXPECT_EQ(token->size(), 16u);
    EXPECT_TRUE(tokens.insert(*token).second);
  }
}

}  // namespace
}  // namespace attend

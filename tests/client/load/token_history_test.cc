// SPDX-License-Identifier: Apache-2.0

#include "client/load/token_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace attend::client {
namespace {

using ::testing::ElementsAre;

// Tokens of two elements of K and one of V.
TokenHistory Numbered(int64_t tokens) {
  CallSpec spec = *ParseCallSpec("H1,D2,Dv1");
  TokenHistory history = *TokenHistory::Make(spec, tokens);
  const HostTensor k = *HostTensor::Make("k", DType::kFloat32, {1, 1, 1, 2});
  const HostTensor v = *HostTensor::Make("v", DType::kFloat32, {1, 1, 1, 1});
  for (int64_t token = 0; token < tokens; ++token) {
    for (const HostTensor* tensor : {&k, &v}) {
      auto* const values = reinterpret_cast<float*>(tensor->data.get());
      std::fill_n(values, tensor->bytes / 4, static_cast<float>(token));
    }
    history.Append(k, v);
  }
  return history;
}

std::vector<float> Values(const TensorRef& tensor) {
  const auto* const values = static_cast<const float*>(tensor.data);
  return {values, values + tensor.bytes / 4};
}

TEST(TokenHistory, KeepsTheNamedTokensOfADraft) {
  TokenHistory history = Numbered(6);
  const TokenHistory copy = *history.Copy(*ParseCallSpec("H1,D2,Dv1"), 6);
  history.KeepDraft(2, std::array<int64_t, 2>{1, 3});
  EXPECT_THAT(history.k.shape, ElementsAre(1, 4, 1, 2));
  EXPECT_THAT(history.v.shape, ElementsAre(1, 4, 1, 1));
  EXPECT_THAT(Values(history.k), ElementsAre(0, 0, 1, 1, 3, 3, 5, 5));
  EXPECT_THAT(Values(history.v), ElementsAre(0, 1, 3, 5));
  EXPECT_THAT(Values(copy.v), ElementsAre(0, 1, 2, 3, 4, 5));
  history.KeepDraft(3, {});
  EXPECT_THAT(Values(history.v), ElementsAre(0, 1, 3));
}

TEST(TokenHistory, WithoutTokensKeepsNone) {
  TokenHistory history = *TokenHistory::Make(*ParseCallSpec("H1,D2"), 3);
  history.KeepDraft(0, {});
  EXPECT_EQ(history.k.bytes, 0);
  EXPECT_EQ(history.v.shape[1], 0);
}

}  // namespace
}  // namespace attend::client

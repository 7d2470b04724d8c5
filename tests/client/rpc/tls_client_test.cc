// SPDX-License-Identifier: Apache-2.0

#include "client/rpc/tls_client.h"

#include <gtest/gtest.h>

namespace attend::client {
namespace {

TEST(TlsClient, AHostNamedLikeASocketSchemeStillUsesTls) {
  TlsOptions options;
  options.ca = "system";
  for (const char* host : {"unix-gw.example:8001", "unixes:8001", "localhost:8001"}) {
    const auto made = TlsClient::Make(options, host);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_NE(*made, nullptr) << host;
  }
  for (const char* socket : {"unix:/run/attend.sock", "unix-abstract:attend"}) {
    const auto made = TlsClient::Make(options, socket);
    ASSERT_TRUE(made.ok()) << made.status().ToString();
    EXPECT_EQ(*made, nullptr) << socket;
  }
}

}  // namespace
}  // namespace attend::client

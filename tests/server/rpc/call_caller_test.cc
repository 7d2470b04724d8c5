// SPDX-License-Identifier: Apache-2.0

#include "server/rpc/call_caller.h"

#include <gtest/gtest.h>

namespace attend {
namespace {

TEST(CallCallerTest, OnlyPeersOnThisHostAreLocal) {
  for (const char* peer :
       {"unix:", "unix:/run/a.sock", "ipv4:127.0.0.1:40000", "ipv4:127.1.2.3:1",
        "ipv6:%5B::1%5D:40000", "ipv6:[::1]:40000", "ipv6:%5B::ffff:127.0.0.1%5D:40000"}) {
    EXPECT_TRUE(IsLocal(peer)) << peer;
  }
  for (const char* peer : {"", "ipv4:10.0.0.1:40000", "ipv4:128.0.0.1:1", "ipv4:12.7.0.1:1",
                           "ipv6:%5B::12%5D:1", "ipv6:%5Bfe80::1%5D:1", "ipv6:[2001:db8::1]:1",
                           "ipv6:%5B::ffff:10.0.0.1%5D:1", "xunix:", "dns:localhost:1"}) {
    EXPECT_FALSE(IsLocal(peer)) << peer;
  }
}

}  // namespace
}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// What gRPC learns of a TLS connection and what the client does, through the functions that the
// server has in OpenSSL's place.

#include "server/tls/tls_connection.h"

#include <gtest/gtest.h>

#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/tls/self_signed.h"
#include "tests/server/support/tls_ends.h"

namespace attend {
namespace {

using test::TlsEnds;

class TlsConnectionTest : public ::testing::Test {
 protected:
  TlsConnection::Options Options(const std::string& peer = "ipv4:192.0.2.1:1") const {
    TlsConnection::Options options;
    options.peer = std::make_shared<const std::string>(peer);
    options.context = context_;
    return options;
  }
  static std::string Taken(bool of_tls) {
    const auto peer = TlsConnection::TakePeer(of_tls);
    return peer == nullptr ? "nobody" : *peer;
  }

  const KeyAndCertificate server_ = *MakeSelfSigned("localhost");
  const std::shared_ptr<const TlsContext> context_ =
      *TlsContext::Make({.cert = {"tls-cert", "cert", server_.certificate},
                         .key = {"tls-key", "key", server_.key},
                         .client_ca = {},
                         .crl = {}},
                        {}, std::time(nullptr));
};

TEST_F(TlsConnectionTest, ThePeerIsOfWhatWasExaminedLastAndTakenOnce) {
  const TlsEnds one(Options("one"), {});
  const TlsEnds other(Options("other"), {});
  EXPECT_EQ(Taken(true), "nobody");
  SSL_session_reused(one.server());
  SSL_session_reused(other.server());
  EXPECT_EQ(Taken(true), "other");
  EXPECT_EQ(Taken(true), "nobody");
  SSL_session_reused(one.server());
  std::thread([] { EXPECT_EQ(Taken(true), "nobody"); }).join();
  SSL_session_reused(one.client());  // one that this process has made elsewhere
  EXPECT_EQ(Taken(true), "nobody");
}

// gRPC examines a connection, refuses it and frees it, and describes another on the same thread.
TEST_F(TlsConnectionTest, AConnectionThatEndsOnceItIsExaminedLeavesNothing) {
  for (const bool elsewhere : {false, true}) {
    const auto free_one = [&] {
      auto one = std::make_unique<TlsEnds>(Options("a peer with more than a string has inside"),
                                           TlsEnds::Client{});
      SSL_session_reused(one->server());
      if (elsewhere) std::thread([&] { one.reset(); }).join();
    };
    free_one();
    EXPECT_EQ(Taken(false), "nobody") << "what has no TLS has no peer of TLS";
    EXPECT_EQ(Taken(true), "nobody") << "and leaves none to the next";
    free_one();
    const TlsEnds next(Options("next"), {});
    SSL_session_reused(next.server());
    EXPECT_EQ(Taken(true), "next");
    free_one();
    EXPECT_EQ(Taken(true), "a peer with more than a string has inside");
  }
}

TEST_F(TlsConnectionTest, ClientsOfHttp2FinishTheirHandshake) {
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    TlsEnds ends(Options(), {.version = version});
    ends.Greet();
    EXPECT_TRUE(ends.Finish());
    EXPECT_TRUE(ends.refused().empty());
  }
}

TEST_F(TlsConnectionTest, WhoNamesNoProtocolIsToldSo) {
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    TlsEnds ends(Options(), {.http2 = false, .version = version});
    ends.Greet();
    EXPECT_FALSE(ends.Finish());
    EXPECT_EQ(ends.refused(), std::vector<std::string>{"no application protocol"});
    const std::string alert = ends.Received().first;
    ASSERT_EQ(alert.size(), 7u);
    EXPECT_EQ(alert[0], SSL3_RT_ALERT);
    EXPECT_EQ(alert[5], SSL3_AL_FATAL);
    EXPECT_EQ(alert[6], SSL_AD_NO_APPLICATION_PROTOCOL);
  }
}

}  // namespace
}  // namespace attend

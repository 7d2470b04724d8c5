// SPDX-License-Identifier: Apache-2.0
//
// Where the server listens: what needs TLS, and Unix sockets that are bound to a tenant.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "server/app/config.h"
#include "server/app/unix_address.h"
#include "tests/server/support/parsed_config.h"

namespace attend {
namespace {

using test::ParsedConfig;
using test::ParseFlags;

void ExpectRefused(const std::vector<std::string>& flags, const std::string& error) {
  const ParsedConfig refused = ParseFlags(flags);
  EXPECT_EQ(refused.outcome, ConfigOutcome::kError) << error;
  EXPECT_NE(refused.text.find(error), std::string::npos) << refused.text;
  EXPECT_EQ(refused.text.find('\n'), refused.text.size() - 1) << refused.text;
}

TEST(ConfigNetworkTest, TcpBeyondLoopbackIsTlsOrInsecure) {
  for (const std::string address : {"0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[2001:db8::1]:1"}) {
    ExpectRefused({"--listen", address},
                  "--listen: " + address +
                      " is beyond loopback, where it must be encrypted: give --tls-cert and "
                      "--tls-key, or --insecure");
    EXPECT_EQ(ParseFlags({"--listen", address, "--insecure"}).outcome, ConfigOutcome::kRun);
    EXPECT_EQ(ParseFlags({"--listen", address, "--tls-cert", "c", "--tls-key", "k"}).outcome,
              ConfigOutcome::kRun);
  }
  for (const std::string address : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1",
                                    "[::ffff:127.0.0.1]:1", "unix:/a"}) {
    EXPECT_EQ(ParseFlags({"--listen", address}).outcome, ConfigOutcome::kRun) << address;
  }
  ExpectRefused({"--listen", "127.0.0.1:1,0.0.0.0:2"}, "0.0.0.0:2 is beyond loopback");
}

TEST(ConfigNetworkTest, TlsSettingsNeedEachOther) {
  ExpectRefused({"--tls-cert", "c"}, "--tls-cert: needs --tls-key");
  ExpectRefused({"--tls-key", "k"}, "--tls-key: needs --tls-cert");
  ExpectRefused({"--tls-client-ca", "a"}, "--tls-client-ca: needs --tls-cert and --tls-key");
  ExpectRefused({"--tls-cert", "c", "--tls-key", "k", "--tls-crl", "r"},
                "--tls-crl: needs --tls-client-ca");
  const Config all =
      ParseFlags({"--tls-cert", "c", "--tls-key", "k", "--tls-client-ca", "a", "--tls-crl", "r"})
          .config;
  EXPECT_EQ(all.tls_cert + all.tls_key + all.tls_client_ca + all.tls_crl, "ckar");
  EXPECT_EQ(all.tls_client_cert, "require");
}

TEST(ConfigNetworkTest, WhoMayConnect) {
  EXPECT_EQ(ParseFlags({"--socket-users", "7,root"}).config.socket_users,
            (std::vector<std::string>{"7", "root"}));
  EXPECT_EQ(ParseFlags({"--tls-client-cert", "allow"}).config.tls_client_cert, "allow");
  ExpectRefused({"--tls-client-cert", "ask"}, "\"ask\" must be one of require, allow");
}

TEST(ConfigNetworkTest, UnixSocketsMayBeBoundToATenant) {
  const ParsedConfig bound =
      ParseFlags({"--tenant", "a=2", "--listen",
                  "unix:/x y?tenant=a,unix:/z,127.0.0.1:1,unix:/d?tenant=default"});
  ASSERT_EQ(bound.outcome, ConfigOutcome::kRun) << bound.text;
  const std::map<std::string, std::string, std::less<>> wanted = {{"unix:/x%20y", "a"},
                                                                  {"unix:/d", "default"}};
  EXPECT_EQ(TenantsOfPeers(bound.config), wanted);
  ExpectRefused({"--listen", "unix:/x?tenant=b"}, "--tenant has no b");
  for (const std::string bad : {"unix:", "unix:?tenant=a", "unix:/x?tenant=", "unix:/x?user=a"}) {
    ExpectRefused({"--listen", bad}, "unix:PATH?tenant=NAME");
  }
}

}  // namespace
}  // namespace attend

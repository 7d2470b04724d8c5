// SPDX-License-Identifier: Apache-2.0
//
// Listening addresses: when TLS is required, and Unix sockets that are bound to a tenant.

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

TEST(ConfigNetworkTest, TcpBeyondLoopbackNeedsTlsOrInsecure) {
  for (const std::string address : {"0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[2001:db8::1]:1"}) {
    ExpectRefused({"--listen", address},
                  "--listen: " + address +
                      " is beyond loopback and must be encrypted: give --tls-cert and "
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

TEST(ConfigNetworkTest, IncompleteTlsSettingsAreRefused) {
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

TEST(ConfigNetworkTest, SocketModeGroupAndUsersRestrictConnections) {
  EXPECT_EQ(ParseFlags({"--socket-users", "7,root"}).config.socket_users,
            (std::vector<std::string>{"7", "root"}));
  EXPECT_EQ(ParseFlags({"--tls-client-cert", "allow"}).config.tls_client_cert, "allow");
  ExpectRefused({"--tls-client-cert", "ask"}, "\"ask\" must be one of require, allow");
}

TEST(ConfigNetworkTest, AUnixSocketCanBeBoundToATenant) {
  const ParsedConfig bound =
      ParseFlags({"--tenant", "a=2", "--listen",
                  "unix:/x y?tenant=a,unix:/z,127.0.0.1:1,unix:/d?tenant=default"});
  ASSERT_EQ(bound.outcome, ConfigOutcome::kRun) << bound.text;
  const Result<UnixAddress> socket = ParseUnixAddress(bound.config.listen[0]);
  ASSERT_TRUE(socket.ok());
  EXPECT_EQ(socket->tenant, "a");
  EXPECT_EQ(socket->path, "/x y");
  ExpectRefused({"--listen", "unix:/x?tenant=b"}, "--tenant does not name b");
  for (const std::string bad :
       {"unix:", "unix:?tenant=a", "unix:/x?tenant=", "unix:/x?user=a", "unix:/x?users=a",
        "unix:/x?users=a&tenant=default", "unix:/x?tenant=default&users=",
        "unix:/x?tenant=default&users=a::b", "unix:/x?tenant=default&mode=9",
        "unix:/x?tenant=default&mode=0060", "unix:/x?tenant=default&group",
        "unix:/x?tenant=default&group=a&group=b", "unix:/x?tenant=default&", "unix:/x?"}) {
    ExpectRefused({"--listen", bad}, "unix:PATH?tenant=NAME");
  }
}

TEST(ConfigNetworkTest, ATenantsSocketCanHaveItsOwnModeGroupAndUsers) {
  const Config config =
      ParseFlags({"--socket-users", "7", "--socket-mode", "0666", "--socket-group", "9"}).config;
  const UnixAddress own =
      *UnixAddressOf("unix:/x?tenant=default&users=root:8&mode=0660&group=web", config);
  EXPECT_EQ(own.path + own.tenant + own.mode + own.group, "/xdefault0660web");
  EXPECT_EQ(own.users, (std::vector<std::string>{"root", "8"}));
  const UnixAddress others = *UnixAddressOf("unix:/x?tenant=default", config);
  EXPECT_EQ(others.mode + others.group, "06669");
  EXPECT_EQ(others.users, std::vector<std::string>{"7"});
  // An address's own group or mode replaces the general ones as a whole.
  const UnixAddress group = *UnixAddressOf("unix:/x?tenant=default&group=web", config);
  EXPECT_EQ(group.mode + group.group, "web");
  const UnixAddress mode = *UnixAddressOf("unix:/x?tenant=default&mode=0660", config);
  EXPECT_EQ(mode.mode + mode.group, "0660");
}

// Otherwise users of one tenant could act as the other tenant through its socket.
TEST(ConfigNetworkTest, SocketsOfDifferentTenantsMustNotShareUsers) {
  const auto with = [](std::vector<std::string> flags, const std::string& a, const std::string& b) {
    flags.insert(flags.end(), {"--tenant", "a=1,b=1", "--listen",
                               "unix:/a?tenant=a" + a + ",unix:/b?tenant=b" + b + ",unix:/c"});
    return ParseFlags(flags);
  };
  for (const std::vector<std::string>& all : {std::vector<std::string>{"--socket-users", "7"},
                                              {"--socket-mode", "0660"},
                                              {"--socket-group", "9"},
                                              {"--socket-users", "7", "--socket-mode", "0666"}}) {
    const ParsedConfig refused = with(all, "&users=8", "");
    EXPECT_EQ(refused.outcome, ConfigOutcome::kError);
    EXPECT_NE(refused.text.find("unix:/b?tenant=b: with sockets of several tenants, "),
              std::string::npos)
        << refused.text;
    EXPECT_EQ(with(all, "&users=8", "&users=9").outcome, ConfigOutcome::kRun);
  }
  EXPECT_EQ(with({"--socket-mode", "0666"}, "&group=1", "&mode=0600").outcome, ConfigOutcome::kRun);
  EXPECT_EQ(with({"--socket-users", "7"}, "&group=1", "&group=2").outcome, ConfigOutcome::kError);
  EXPECT_EQ(with({}, "", "").outcome, ConfigOutcome::kRun) << "they are the server's user's alone";
  EXPECT_EQ(ParseFlags({"--socket-users", "7", "--tenant", "a=1", "--listen",
                        "unix:/a?tenant=a,unix:/b?tenant=a"})
                .outcome,
            ConfigOutcome::kRun);
}

TEST(ConfigNetworkTest, MetricsBeyondLoopbackNeedAuthentication) {
  const std::vector<std::string> beyond = {"--metrics-listen", "0.0.0.0:1"};
  const std::vector<std::string> tls = {"--tls-cert", "c", "--tls-key", "k"};
  const auto with = [&](const std::vector<std::string>& more, bool encrypted) {
    std::vector<std::string> flags = beyond;
    if (encrypted) flags.insert(flags.end(), tls.begin(), tls.end());
    flags.insert(flags.end(), more.begin(), more.end());
    return ParseFlags(flags);
  };
  EXPECT_NE(with({"--metrics-auth", "a"}, false).text.find("must be encrypted"), std::string::npos);
  const ParsedConfig open = with({}, true);
  EXPECT_EQ(open.outcome, ConfigOutcome::kError);
  EXPECT_NE(open.text.find("--metrics-listen: 0.0.0.0:1 is beyond loopback and must authenticate "
                           "readers: give --metrics-auth or --tokens, or --insecure"),
            std::string::npos)
      << open.text;
  EXPECT_EQ(MetricsAccessOf(with({"--metrics-auth", "a", "--tokens", "t"}, true).config).auth, "a");
  const ParsedConfig tokens = with({"--tokens", "t"}, true);
  ASSERT_EQ(tokens.outcome, ConfigOutcome::kRun) << tokens.text;
  const MetricsAccess access = MetricsAccessOf(tokens.config);
  EXPECT_EQ(access.tls.cert + access.tls.key + access.auth, "ckt");
  EXPECT_FALSE(access.loopback_only);
  EXPECT_EQ(MetricsAccessOf(with({"--insecure"}, false).config).auth, "");
  // On loopback none of this is needed.
  const MetricsAccess local = MetricsAccessOf(ParseFlags({"--tokens", "t"}).config);
  EXPECT_EQ(local.tls.cert + local.auth, "");
  EXPECT_TRUE(local.loopback_only);
}

}  // namespace
}  // namespace attend

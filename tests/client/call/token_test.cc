// SPDX-License-Identifier: Apache-2.0

#include "client/call/token.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "client/client.h"

namespace attend::client {
namespace {

const std::string kToken = "attend_0123456789abcdef";

class TokenTest : public ::testing::Test {
 protected:
  void SetUp() override { unsetenv(kTokenVariable); }
  void TearDown() override { unsetenv(kTokenVariable); }
};

TEST_F(TokenTest, AGivenTokenOverridesTheEnvironments) {
  EXPECT_EQ(*TokenOf(""), "");
  EXPECT_EQ(*TokenOf(kToken), kToken);
  setenv(kTokenVariable, "of_the_environment", 1);
  EXPECT_EQ(*TokenOf(kToken), kToken);
  EXPECT_EQ(*TokenOf(""), "of_the_environment");
  setenv(kTokenVariable, "", 1);
  EXPECT_EQ(*TokenOf(""), "");
}

TEST_F(TokenTest, AMalformedTokenIsRefusedAndNotQuoted) {
  const std::string advice =
      ", must be visible ASCII only; token_file and --token-file read a file's first line";
  for (const auto& [wrong, why] : std::map<std::string, std::string>{
           {"fifteen_bytes_x", "15 characters, must have 16 to 512"},
           {std::string(513, 'x'), "513 characters, must have 16 to 512"},
           {kToken + "\n", "a line break at character 24 of 24" + advice},
           {kToken + " " + kToken, "a space at character 24 of 47" + advice},
           {kToken + "\xc3\xa4", "byte 0xc3 at character 24 of 25" + advice}}) {
    const Result<std::string> token = TokenOf(wrong);
    ASSERT_FALSE(token.ok()) << wrong;
    EXPECT_EQ(token.status().message(), "token has " + why);
  }
}

TEST_F(TokenTest, WithoutTlsTheTokenIsSentOnlyToThisHost) {
  for (const char* target :
       {"unix:/run/attend.sock", "unix-abstract:attend", "127.0.0.1:8001", "127.9.9.9:8001",
        "[::1]:8001", "localhost:8001", "ipv4:127.0.0.1:8001", "ipv6:[::1]:8001",
        "dns:localhost:8001", "dns:///localhost:8001", "ipv4:127.0.0.1:1,127.0.0.2:1"}) {
    EXPECT_TRUE(IsOnThisHost(target)) << target;
    EXPECT_TRUE(CheckTokenStays(kToken, target).ok()) << target;
  }
  for (const char* target :
       {"10.0.0.1:8001", "example.org:8001", "[2001:db8::1]:8001", "127.0.0.1.example:8001",
        "localhost.example:8001", "ipv4:127.0.0.1:1,10.0.0.1:1", "dns://10.0.0.1/example.org:1",
        "dns://localhost/example.org:1", "dns:", "[::ffff:10.0.0.1]:1", "1270.0.0.1:1"}) {
    EXPECT_FALSE(IsOnThisHost(target)) << target;
    EXPECT_TRUE(CheckTokenStays("", target).ok()) << target;
    const Status refused = CheckTokenStays(kToken, target);
    EXPECT_EQ(refused.message(),
              "the token would go to " + std::string(target) +
                  " in the clear: without TLS it is sent only to loopback and Unix sockets");
  }
}

TEST_F(TokenTest, AClientThatWouldSendTheTokenUnencryptedIsRefused) {
  ClientOptions options;
  options.server = "10.0.0.1:8001";
  EXPECT_TRUE(Client::Make(options).ok());
  options.token = kToken;
  EXPECT_EQ(Client::Make(options).status().code(), Code::kInvalidArgument);
  options.token.clear();
  setenv(kTokenVariable, kToken.c_str(), 1);
  EXPECT_EQ(Client::Make(options).status().code(), Code::kInvalidArgument);
  options.server = "127.0.0.1:8001";
  EXPECT_EQ((*Client::Make(options))->token(), kToken);
}

TEST_F(TokenTest, TheTokenIsAFilesFirstLine) {
  const std::string path = ::testing::TempDir() + "/attend-token-test";
  std::ofstream(path) << kToken << "\nmore\n";
  EXPECT_EQ(*ReadTokenFile(path), kToken);
  std::ofstream(path) << "short\n";
  EXPECT_NE(ReadTokenFile(path).status().message().find(path + ": token has 5 characters"),
            std::string::npos);
  std::ofstream(path) << std::string(1 << 20, 'x');
  EXPECT_FALSE(ReadTokenFile(path).ok());
  std::ofstream(path) << kToken << '\0' << "\n";
  EXPECT_FALSE(ReadTokenFile(path).ok());
  std::ofstream(path) << "\n" << kToken << "\n";
  EXPECT_FALSE(ReadTokenFile(path).ok());
  std::filesystem::remove(path);
  EXPECT_NE(ReadTokenFile(path).status().message().find("cannot be read"), std::string::npos);
  // If a file was to be read, the environment's token does not replace it.
  setenv(kTokenVariable, kToken.c_str(), 1);
  for (const char* const blank : {"", "\n", " \n", "\r\n", "  \r\nmore\n"}) {
    std::ofstream(path) << blank;
    EXPECT_NE(ReadTokenFile(path).status().message().find("its first line is empty"),
              std::string::npos)
        << blank;
  }
}

}  // namespace
}  // namespace attend::client

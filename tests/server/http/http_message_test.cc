// SPDX-License-Identifier: Apache-2.0

#include "server/http/http_message.h"

#include <gtest/gtest.h>

namespace attend {
namespace {

TEST(HttpMessageTest, ARequestIsCompleteAtItsEmptyLine) {
  EXPECT_TRUE(IsWholeHttpRequest("GET / HTTP/1.1\r\n\r\n"));
  EXPECT_TRUE(IsWholeHttpRequest("GET /\n\n"));
  EXPECT_FALSE(IsWholeHttpRequest("GET / HTTP/1.1\r\nHost: a\r\n"));
  EXPECT_FALSE(IsWholeHttpRequest(""));
}

TEST(HttpMessageTest, ReadsMethodPathAndAuthorization) {
  const HttpRequest request = ParseHttpRequest(
      "GET /metrics?a=b HTTP/1.1\r\nHost: a\r\nauthoriZATION: \t Bearer x \r\n"
      "Authorization: second\r\n\r\nAuthorization: body");
  EXPECT_EQ(request.method, "GET");
  EXPECT_EQ(request.path, "/metrics");
  EXPECT_EQ(request.authorization, "Bearer x");
  EXPECT_EQ(ParseHttpRequest("GET / HTTP/1.1\r\n\r\nAuthorization: body").authorization, "");
  EXPECT_EQ(ParseHttpRequest("GET /\nAuthorization:\n\n").authorization, "");
  EXPECT_EQ(ParseHttpRequest("GET /\nAuthorizatio: a\nAuthorizations: b\n\n").authorization, "");
}

TEST(HttpMessageTest, MalformedRequestsHaveEmptyFields) {
  for (const char* bytes : {"", "\n", "GET", " ", "?", ":\n:\n", "\r\n\r\n"}) {
    const HttpRequest request = ParseHttpRequest(bytes);
    EXPECT_EQ(request.path, "") << bytes;
    EXPECT_EQ(request.authorization, "") << bytes;
  }
}

TEST(HttpMessageTest, ParsesBasicCredentials) {
  using Pair = std::pair<std::string, std::string>;
  EXPECT_EQ(ParseBasic("Basic cHJvbWV0aGV1czpvcGVuIHNlc2FtZQ=="),
            Pair("prometheus", "open sesame"));
  EXPECT_EQ(ParseBasic("bASIC   YTpiOmM="), Pair("a", "b:c"));
  EXPECT_EQ(ParseBasic("Basic Og=="), Pair("", ""));
  for (const char* wrong : {"", "Basic", "Basic ", "Basic cHJvbWV0aGV1cw==", "Basic ====",
                            "Basic YTp", "Basic !!!!", "Bearer YTpiOmM=", "Basicx YTpiOmM="}) {
    EXPECT_FALSE(ParseBasic(wrong).has_value()) << wrong;
  }
}

TEST(HttpMessageTest, ResponsesHaveTheirLengthAndHeadHasNoBody) {
  const HttpAnswer answer{.status = "401 Unauthorized", .body = "no\n", .challenge = "Bearer"};
  EXPECT_EQ(FormatHttpAnswer(answer, true),
            "HTTP/1.1 401 Unauthorized\r\nContent-Type: text/plain; charset=utf-8\r\n"
            "Content-Length: 3\r\nWWW-Authenticate: Bearer\r\nConnection: close\r\n\r\nno\n");
  const std::string head = FormatHttpAnswer({.body = "ok\n"}, false);
  EXPECT_TRUE(head.ends_with("Content-Length: 3\r\nConnection: close\r\n\r\n")) << head;
}

}  // namespace
}  // namespace attend

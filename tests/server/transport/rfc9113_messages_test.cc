// SPDX-License-Identifier: Apache-2.0
//
// RFC 9113, section 8: requests. A malformed one is a stream error.

#include "tests/server/support/violations.h"

namespace attend::http2 {
namespace {

class Rfc9113Messages : public Violations {};

TEST_P(Rfc9113Messages, AreAnswered) {
  Judge(GetParam(), std::string(kPreface) + Settings() + SettingsAck());
}

Verdict Malformed() { return Stream(1, NGHTTP2_PROTOCOL_ERROR); }
// A request with one more header.
std::string With(std::string_view name, std::string_view value) {
  return Headers(1, Fields() + Field(name, value));
}
// A request with exactly these headers.
std::string Only(std::string_view method, std::string_view scheme, std::string_view path,
                 std::string_view more = "") {
  std::string block;
  for (const auto& [name, value] :
       {std::pair(":method", method), std::pair(":scheme", scheme), std::pair(":path", path)}) {
    if (!value.empty()) block += Field(name, value);
  }
  return Headers(1, block.append(more));
}
const std::string kHost = Field(":authority", "test");

const Rule kContent[] = {
    {"8.1", "trailers", Open(1) + Data(1, "x") + Headers(1, Field("done", "1")), Taken()},
    {"8.1", "trailers that do not end", Open(1) + Headers(1, Field("done", "1"), kEndHeaders),
     Malformed()},
    {"8.1", "data after trailers", Open(1) + Headers(1, Field("done", "1")) + Data(1, "x"),
     Connection(NGHTTP2_STREAM_CLOSED)},
    {"8.1", "pseudo header in trailers", Open(1) + Headers(1, Field(":path", "/")), Malformed()},
    {"8.1.1", "as much content as was said",
     Headers(1, Fields() + Field("content-length", "3"), kEndHeaders) + Data(1, "abc", kEndStream),
     Taken()},
    {"8.1.1", "less content than was said",
     Headers(1, Fields() + Field("content-length", "3"), kEndHeaders) + Data(1, "ab", kEndStream),
     Malformed()},
    {"8.1.1", "more content than was said",
     Headers(1, Fields() + Field("content-length", "3"), kEndHeaders) + Data(1, "abcd"),
     Malformed()},
    {"8.1.1", "no content where some was said", With("content-length", "3"), Malformed()},
    {"8.1.1", "length that is no number", With("content-length", "0x0"), Malformed()},
    {"8.1.1", "two lengths",
     Headers(1, Fields() + Field("content-length", "0") + Field("content-length", "0")),
     Malformed()},
};
INSTANTIATE_TEST_SUITE_P(Content, Rfc9113Messages, ::testing::ValuesIn(kContent), NameOf);

const Rule kFields[] = {
    {"8.2.1", "upper case", With("Key", "value"), Malformed()},
    {"8.2.1", "upper case at the end", With("keY", "value"), Malformed()},
    {"8.2.1", "no name", With("", "value"), Malformed()},
    {"8.2.1", "space in a name", With("a key", "value"), Malformed()},
    {"8.2.1", "colon in a name", With("a:key", "value"), Malformed()},
    {"8.2.1", "control character in a name", With("key\x01", "value"), Malformed()},
    {"8.2.1", "byte beyond ASCII in a name", With("key\xc3", "value"), Malformed()},
    {"8.2.1", "zero in a value", With("key", std::string_view("a\0b", 3)), Malformed()},
    {"8.2.1", "carriage return in a value", With("key", "a\rb"), Malformed()},
    {"8.2.1", "line feed in a value", With("key", "a\nb"), Malformed()},
    {"8.2.1", "space before a value", With("key", " value"), Malformed()},
    {"8.2.1", "tab after a value", With("key", "value\t"), Malformed()},
    {"8.2.1", "empty value", With("key", ""), Taken()},
    {"8.2.1", "bytes beyond ASCII in a value", With("key", "\xc3\xa9"), Taken()},
    {"8.2.2", "connection", With("connection", "close"), Malformed()},
    {"8.2.2", "proxy connection", With("proxy-connection", "close"), Malformed()},
    {"8.2.2", "keep alive", With("keep-alive", "timeout=5"), Malformed()},
    {"8.2.2", "transfer encoding", With("transfer-encoding", "chunked"), Malformed()},
    {"8.2.2", "upgrade", With("upgrade", "h2c"), Malformed()},
    {"8.2.2", "te of more than trailers", With("te", "gzip"), Malformed()},
    {"8.2.3", "cookie in crumbs",
     Headers(1, Fields() + Field("cookie", "a=b") + Field("cookie", "c=d")), Taken()},
};
INSTANTIATE_TEST_SUITE_P(Fields, Rfc9113Messages, ::testing::ValuesIn(kFields), NameOf);

const Rule kPseudo[] = {
    {"8.3", "unknown pseudo header", Only("POST", "http", "/", Field(":key", "value")),
     Malformed()},
    {"8.3", "pseudo header of an answer", Only("POST", "http", "/", Field(":status", "200")),
     Malformed()},
    {"8.3", "pseudo header after another",
     Only("POST", "http", "", Field("a", "b") + Field(":path", "/")), Malformed()},
    {"8.3", "method twice", Only("POST", "http", "/", Field(":method", "POST")), Malformed()},
    {"8.3", "scheme twice", Only("POST", "http", "/", Field(":scheme", "http")), Malformed()},
    {"8.3", "path twice", Only("POST", "http", "/", Field(":path", "/")), Malformed()},
    {"8.3", "authority twice", Only("POST", "http", "/", kHost + kHost), Malformed()},
    {"8.3.1", "no method", Only("", "http", "/", kHost), Malformed()},
    {"8.3.1", "no scheme", Only("POST", "", "/", kHost), Malformed()},
    {"8.3.1", "no path", Only("POST", "http", "", kHost), Malformed()},
    {"8.3.1", "empty path", Only("POST", "http", "", Field(":path", "") + kHost), Malformed()},
    {"8.3.1", "path without its slash", Only("POST", "http", "a", kHost), Malformed()},
    {"8.3.1", "star as path", Only("POST", "http", "*", kHost), Malformed()},
    {"8.3.1", "star as path of OPTIONS", Only("OPTIONS", "http", "*", kHost), Taken()},
    {"8.3.1", "method that is no token", Only("PO ST", "http", "/", kHost), Malformed()},
    {"8.3.1", "no authority", Only("POST", "http", "/"), Malformed()},
    {"8.3.1", "host in place of the authority", Only("POST", "http", "/", Field("host", "test")),
     Taken()},
    {"8.3.1", "bytes in an authority that it may not have",
     Only("POST", "http", "/", Field(":authority", "te st")), Malformed()},
    {"8.5", "connect", Only("CONNECT", "", "", kHost), Taken()},
    {"8.5", "connect with a path", Only("CONNECT", "", "/", kHost), Malformed()},
    {"8.5", "connect with a scheme", Only("CONNECT", "http", "", kHost), Malformed()},
    {"8.5", "connect to nothing", Only("CONNECT", "", ""), Malformed()},
};
INSTANTIATE_TEST_SUITE_P(Pseudo, Rfc9113Messages, ::testing::ValuesIn(kPseudo), NameOf);

}  // namespace
}  // namespace attend::http2

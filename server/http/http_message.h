// SPDX-License-Identifier: Apache-2.0
//
// The subset of HTTP/1.1 that scrapes and probes need: one request without a body per connection.
// Pure.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace attend {

inline constexpr size_t kHttpRequestBytesMax = 8192;

// Views into the request's bytes.
struct HttpRequest {
  std::string_view method;
  std::string_view path;           // without the query
  std::string_view authorization;  // value of the first such header; empty: none
  bool local = false;              // the client is on this host; not parsed, set by the connection
};

struct HttpAnswer {
  std::string_view status = "200 OK";
  std::string body = {};
  std::string_view type = "text/plain; charset=utf-8";
  std::string_view challenge = {};  // value of WWW-Authenticate; empty: none
};

// Whether the bytes contain the end of a request's headers.
bool IsWholeHttpRequest(std::string_view bytes);
// Accepts any bytes; missing parts are empty.
HttpRequest ParseHttpRequest(std::string_view bytes);
// User name and password of a Basic Authorization header (RFC 7617).
std::optional<std::pair<std::string, std::string>> ParseBasic(std::string_view authorization);
// The bytes of the answer, after which the connection closes. HEAD gets no body.
std::string FormatHttpAnswer(const HttpAnswer& answer, bool with_body);

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// The little of HTTP/1.1 that scrapes and probes need: requests without a body, one on each
// connection. Pure.

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
  std::string_view path;           // without its query
  std::string_view authorization;  // the value of the first header of this name; empty: none
  bool local = false;              // its sender is on this host; set by who knows
};

struct HttpAnswer {
  std::string_view status = "200 OK";
  std::string body = {};
  std::string_view type = "text/plain; charset=utf-8";
  std::string_view challenge = {};  // of WWW-Authenticate; empty: none
};

// True if these bytes hold a request's last line.
bool IsWholeHttpRequest(std::string_view bytes);
// Any bytes are a request; what is missing is empty.
HttpRequest ParseHttpRequest(std::string_view bytes);
// Name and password of the value of an Authorization that is basic (RFC 7617).
std::optional<std::pair<std::string, std::string>> ParseBasic(std::string_view authorization);
// The bytes of an answer, after which the connection ends. HEAD gets none of the body.
std::string FormatHttpAnswer(const HttpAnswer& answer, bool with_body);

}  // namespace attend

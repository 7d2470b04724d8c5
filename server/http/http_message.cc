// SPDX-License-Identifier: Apache-2.0

#include "server/http/http_message.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cctype>

#include "server/util/wipe.h"

namespace attend {
namespace {

constexpr std::string_view kBlanks = " \t\r";

// Removes and returns the first line of `bytes`.
std::string_view TakeLine(std::string_view& bytes) {
  const size_t end = bytes.find('\n');
  const std::string_view line = bytes.substr(0, end);
  bytes.remove_prefix(end == std::string_view::npos ? bytes.size() : end + 1);
  return line.ends_with('\r') ? line.substr(0, line.size() - 1) : line;
}

std::string_view Trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

// Case-insensitive; `lower` is in lower case.
bool IsName(std::string_view name, std::string_view lower) {
  return std::equal(name.begin(), name.end(), lower.begin(), lower.end(), [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == b;
  });
}

}  // namespace

bool IsWholeHttpRequest(std::string_view bytes) {
  return bytes.find("\r\n\r\n") != std::string_view::npos ||
         bytes.find("\n\n") != std::string_view::npos;
}

HttpRequest ParseHttpRequest(std::string_view bytes) {
  HttpRequest request;
  const std::string_view first = TakeLine(bytes);
  const size_t space = first.find(' ');
  request.method = first.substr(0, space);
  if (space != std::string_view::npos) request.path = first.substr(space + 1);
  request.path = request.path.substr(0, request.path.find_first_of(" ?"));
  for (std::string_view line; !(line = TakeLine(bytes)).empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !IsName(line.substr(0, colon), "authorization"))
      continue;
    request.authorization = Trimmed(line.substr(colon + 1));
    break;
  }
  return request;
}

std::optional<std::pair<std::string, std::string>> ParseBasic(std::string_view authorization) {
  const size_t space = std::min(authorization.find(' '), authorization.size());
  if (!IsName(authorization.substr(0, space), "basic")) return std::nullopt;
  const std::string_view text = Trimmed(authorization.substr(space));
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  std::string pair(text.size() / 4 * 3, '\0');
  if (EVP_DecodeBlock(reinterpret_cast<unsigned char*>(pair.data()),
                      reinterpret_cast<const unsigned char*>(text.data()),
                      static_cast<int>(text.size())) < 0) {
    return std::nullopt;
  }
  pair.resize(pair.size() - (text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0));
  const WipedAtEnd wiped(pair);
  const size_t colon = pair.find(':');
  if (colon == std::string::npos) return std::nullopt;
  return std::pair(pair.substr(0, colon), pair.substr(colon + 1));
}

std::string FormatHttpAnswer(const HttpAnswer& answer, bool with_body) {
  std::string text = "HTTP/1.1 ";
  text.append(answer.status).append("\r\nContent-Type: ").append(answer.type);
  text.append("\r\nContent-Length: ").append(std::to_string(answer.body.size()));
  if (!answer.challenge.empty()) text.append("\r\nWWW-Authenticate: ").append(answer.challenge);
  text.append("\r\nConnection: close\r\n\r\n");
  if (with_body) text += answer.body;
  return text;
}

}  // namespace attend

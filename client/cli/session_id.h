// SPDX-License-Identifier: Apache-2.0
//
// Session ids on the command line: hexadecimal, followed by @HOST:PORT if there are several
// servers.

#pragma once

#include <string>

namespace attend::client {

std::string SessionIdText(const std::string& id, const std::string& server = "");
// Why the text is not a valid id; empty if it is.
std::string CheckSessionId(const std::string& text);
// The bytes of an id that CheckSessionId has accepted, and its server.
struct SessionName {
  std::string id;
  std::string server;  // empty: none
};
SessionName ParseSessionId(const std::string& text);

}  // namespace attend::client

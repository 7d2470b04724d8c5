// SPDX-License-Identifier: Apache-2.0
//
// Sessions' ids on the command line: in hexadecimal, and @HOST:PORT where there are several
// servers.

#pragma once

#include <string>

namespace attend::client {

std::string SessionIdText(const std::string& id, const std::string& server = "");
// What is wrong with a text that should be an id; empty: nothing.
std::string CheckSessionId(const std::string& text);
// The bytes of an id that CheckSessionId has passed, and the server that it names.
struct SessionName {
  std::string id;
  std::string server;  // empty: none
};
SessionName ParseSessionId(const std::string& text);

}  // namespace attend::client

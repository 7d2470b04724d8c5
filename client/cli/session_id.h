// SPDX-License-Identifier: Apache-2.0
//
// Sessions' ids on the command line: in hexadecimal.

#pragma once

#include <string>

namespace attend::client {

std::string SessionIdText(const std::string& id);
// What is wrong with a text that should be an id; empty: nothing.
std::string CheckSessionId(const std::string& text);
// The bytes of an id that CheckSessionId has passed.
std::string ParseSessionId(const std::string& text);

}  // namespace attend::client

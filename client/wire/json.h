// SPDX-License-Identifier: Apache-2.0
//
// A message as JSON text, for callers without its generated class.

#pragma once

#include <string>

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace attend::client {

// Names as in the proto, all fields but unset messages; 64-bit numbers as numbers, enums by name,
// bytes in hexadecimal; in ASCII. `indent`: spaces, for people; -1: on one line.
std::string JsonOf(const google::protobuf::Message& message, int indent = -1);

// "0a1b".
std::string Hex(const std::string& bytes);
// The reverse; empty if it is not that.
std::string FromHex(const std::string& digits);

}  // namespace attend::client

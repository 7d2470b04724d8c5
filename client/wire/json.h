// SPDX-License-Identifier: Apache-2.0
//
// A message as JSON text, for callers without its generated class.

#pragma once

#include <string>

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace attend::client {

// Names as in the .proto; all fields except unset messages; 64-bit numbers as numbers, enums by
// name, bytes in hexadecimal; ASCII only. `indent`: spaces; -1: one line.
std::string JsonOf(const google::protobuf::Message& message, int indent = -1);

// "0a1b".
std::string Hex(const std::string& bytes);
// The reverse of Hex; empty for invalid input.
std::string FromHex(const std::string& digits);

}  // namespace attend::client

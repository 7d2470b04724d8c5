// SPDX-License-Identifier: Apache-2.0
//
// Small valid inputs of transport_fuzz.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "tests/server/support/http2_bytes.h"

namespace attend::fuzz {

// A call of transport_fuzz with this letter (Call in transport_fuzz.cc).
inline std::string Call(uint32_t id, char does, const std::string& more = "") {
  using http2::Field;
  return http2::Headers(id,
                        http2::Indexed(3) + http2::Indexed(6) +
                            Field(":path", std::string("/") + does) + Field(":authority", "test") +
                            Field("content-type", "application/grpc") + Field("te", "trailers") +
                            more,
                        http2::kEndHeaders);
}

// By name.
inline std::map<std::string, std::string> TransportSeeds() {
  std::map<std::string, std::string> seeds;
  const auto add = [&](const char* name, std::string input) { seeds[name] = std::move(input); };
  const std::string message = std::string(4, '\0') + "\5hello";
  const std::string last = http2::Data(1, message, http2::kEndStream);
  add("unary", Call(1, 'e') + last);
  add("stream", Call(1, 'e') + http2::Data(1, message + message.substr(0, 7)) +
                    http2::Data(1, message.substr(7)) + last);
  std::string calls;
  uint32_t id = static_cast<uint32_t>(-1);
  for (const char does : {'e', 'b', 'r', 'h', 'd'}) {
    id += 2;
    calls += Call(id, does) + http2::Data(id, message);
  }
  add("calls", calls);
  add("big",
      Call(1, 'b') + last + http2::WindowUpdate(0, 1 << 20) + http2::WindowUpdate(1, 1 << 20));
  add("reset", Call(1, 'h') + http2::Reset(1) + Call(3, 'e') + http2::Reset(3));
  add("late", Call(1, 'h', http2::Field("grpc-timeout", "1n")));
  add("metadata", Call(1, 'e', http2::Field("a-bin", "AAE,AAI=") + http2::Field("a", "b")) + last);
  add("encoded", Call(1, 'e', http2::Field("grpc-encoding", "gzip")) +
                     http2::Data(1, "\1" + message.substr(1), http2::kEndStream));
  const std::string block = Call(1, 'e').substr(9);
  add("continued", http2::Headers(1, block.substr(0, 9), 0) +
                       http2::Continuation(1, block.substr(9, 9), 0) +
                       http2::Continuation(1, block.substr(18)) + last);
  add("padded", Call(1, 'e') +
                    http2::Data(1, "\3" + message + std::string(3, '\0'), http2::kPadded) +
                    http2::Data(1, "", http2::kEndStream));
  add("trailers", Call(1, 'e') + http2::Headers(1, http2::Field("a", "b")));
  add("rest", http2::Setting(4, 100) + http2::Frame(6, 0, 0, "draining") +
                  http2::Frame(2, 0, 1, std::string(5, '\1')) +
                  http2::Frame(7, 0, 0, std::string(8, '\0')) +
                  http2::Frame(0x42, 0, 0, "unknown") + Call(5, 'e'));
  return seeds;
}

}  // namespace attend::fuzz

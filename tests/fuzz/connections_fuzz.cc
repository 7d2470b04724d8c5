// SPDX-License-Identifier: Apache-2.0
//
// What comes on a connection before it is a message: HTTP/2 frames, whose heads are looked at
// before gRPC reads them, and requests to the metrics endpoint. Frames give the same verdict in
// pieces of any size, and what passes keeps the bounds; an HTTP request is answered in one way.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>

#include "server/http2_frames.h"
#include "server/metrics_endpoint.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kStreamsMax = 4;
constexpr size_t kPrefaceBytes = 24;

// Whether the frames pass, in pieces of at most `longest` bytes.
bool Passes(std::string_view bytes, size_t longest) {
  Http2Frames frames({.streams = kStreamsMax});
  while (!bytes.empty()) {
    const size_t step = std::min(longest, bytes.size());
    if (frames.Read({reinterpret_cast<const uint8_t*>(bytes.data()), step}, TimePoint())) {
      return false;
    }
    bytes.remove_prefix(step);
  }
  return true;
}

// That no block of headers in frames that passed is above the bounds.
void RequireBounds(std::string_view bytes) {
  int64_t header_bytes = 0;
  int64_t header_frames = 0;
  int64_t streams = 0;
  uint32_t last_stream = 0;
  bool acknowledged = false;
  bytes.remove_prefix(std::min(kPrefaceBytes, bytes.size()));
  while (bytes.size() >= 9) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const size_t length = static_cast<size_t>(byte(0)) << 16 | byte(1) << 8 | byte(2);
    const int type = byte(3);
    const int flags = byte(4);
    if (type == 1) header_bytes = header_frames = 0;
    const uint32_t stream = (byte(5) & 0x7fu) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8);
    if (type == 1 && stream > last_stream) {
      last_stream = stream;
      if (!acknowledged) ++streams;
    }
    if (type == 1 || type == 9) {
      header_bytes += static_cast<int64_t>(length);
      ++header_frames;
      ATTEND_FUZZ_REQUIRE(header_bytes <= Http2Frames::kHeaderBytesMax &&
                              header_frames <= Http2Frames::kHeaderFramesMax &&
                              streams <= kStreamsMax,
                          std::to_string(header_bytes));
      if ((flags & 4) != 0) header_bytes = header_frames = 0;
    }
    acknowledged |= type == 4 && (flags & 1) != 0;
    bytes.remove_prefix(std::min(bytes.size(), 9 + length));
  }
}

void ReadFrames(std::string_view input) {
  const bool passes = Passes(input, input.size());
  ATTEND_FUZZ_REQUIRE(Passes(input, 1) == passes, "byte by byte");
  ATTEND_FUZZ_REQUIRE(Passes(input, 7) == passes, "in sevens");
  if (passes) RequireBounds(input);
}

// The answer to a request, "" if the endpoint waits for more.
std::string Ask(int port, std::string_view request) {
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // Ended by a reset: else ports would run out.
  const linger reset{1, 0};
  setsockopt(client, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  const timeval patience{60, 0};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ATTEND_FUZZ_REQUIRE(
      connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
      std::to_string(port));
  std::string answer;
  if (send(client, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
    shutdown(client, SHUT_WR);
    char bytes[4096];
    for (;;) {
      const ssize_t got = Receive(client, bytes, sizeof(bytes));
      ATTEND_FUZZ_REQUIRE(got >= 0 || errno == ECONNRESET, "no end");
      if (got <= 0) break;
      answer.append(bytes, static_cast<size_t>(got));
    }
  }
  close(client);
  return answer;
}

void AskMetrics(std::string_view input) {
  static auto* const endpoint = [] {
    auto started = MetricsEndpoint::Start("127.0.0.1:0", {});
    ATTEND_FUZZ_REQUIRE(started.ok(), started.status().ToString());
    return started->release();
  }();
  const std::string answer = Ask(endpoint->port(), input);
  if (answer.empty()) return;  // it was no whole request
  const bool known = answer.starts_with("HTTP/1.1 200 ") || answer.starts_with("HTTP/1.1 404 ") ||
                     answer.starts_with("HTTP/1.1 405 ") || answer.starts_with("HTTP/1.1 431 ");
  ATTEND_FUZZ_REQUIRE(known && answer.find("\r\n\r\n") != answer.npos, answer);
  if (answer.starts_with("HTTP/1.1 200 ")) {
    ATTEND_FUZZ_REQUIRE(input.starts_with("GET /metrics") || input.starts_with("HEAD /metrics"),
                        std::string(input));
  }
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = attend::fuzz::View(data, size);
  if (input.empty()) return 0;
  attend::fuzz::ReadFrames(input);
  // What begins like no request costs no connection, or all of the time would go there.
  if (input.starts_with("GET ") || input.starts_with("HEAD ")) attend::fuzz::AskMetrics(input);
  return 0;
}

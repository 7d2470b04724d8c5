// SPDX-License-Identifier: Apache-2.0
//
// A gRPC client on libnghttp2, without a socket: bytes in, bytes out. It keeps all answers, and can
// send frames that a gRPC client would not send.

#pragma once

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attend {

// A message with its five-byte prefix.
std::string Framed(std::string_view message, bool compressed = false);

class Http2Client {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  struct Answer {
    std::map<std::string, std::string> headers;
    std::map<std::string, std::string> trailers;
    std::string body;
    bool ended = false;  // by the server
    bool closed = false;
    uint32_t error = 0;

    // The messages without their prefixes.
    std::vector<std::string> Messages() const;
    // The value of grpc-status, from headers or trailers; -1: none.
    int Status() const;
    std::string Message() const;
  };

  explicit Http2Client(bool grants_windows = true);
  ~Http2Client();
  Http2Client(const Http2Client&) = delete;
  Http2Client& operator=(const Http2Client&) = delete;

  // A POST of that path with the headers that gRPC's clients send, and `more`.
  int32_t Begin(std::string_view path, const Headers& more = {}, bool ends = false);
  // A request with exactly these headers.
  int32_t BeginAs(const Headers& headers, bool ends = false);
  void Send(int32_t id, std::string_view bytes, bool ends = false);
  void SendMessage(int32_t id, std::string_view message, bool ends = true) {
    Send(id, Framed(message), ends);
  }
  void Reset(int32_t id, uint32_t error = NGHTTP2_CANCEL);
  void Ping();
  void Grant(int32_t id, int32_t bytes);
  // DATA and HEADERS frames have this much padding from now on.
  void Pad(size_t bytes) { padding_bytes_ = bytes; }

  // The bytes that it has to send now.
  std::string Output();
  // False: the bytes are not HTTP/2.
  bool Receive(std::string_view bytes);

  const Answer& answer(int32_t id) { return answers_[id]; }
  uint32_t streams_max() const;  // as announced by the server
  // How many bytes it may send at once, over all streams.
  int64_t window_bytes() const { return nghttp2_session_get_remote_window_size(session_); }
  const std::vector<std::pair<int32_t, uint32_t>>& goaways() const { return goaways_; }
  int64_t pings_answered() const { return pings_answered_; }
  // The types of all received frames.
  const std::vector<uint8_t>& frames() const { return frames_; }

 private:
  struct Sending;
  struct Callbacks;

  nghttp2_session* session_ = nullptr;
  std::map<int32_t, std::unique_ptr<Sending>> sending_;
  std::map<int32_t, Answer> answers_;
  std::vector<std::pair<int32_t, uint32_t>> goaways_;  // last stream, error
  std::vector<uint8_t> frames_;
  int64_t pings_answered_ = 0;
  size_t padding_bytes_ = 0;
};

}  // namespace attend

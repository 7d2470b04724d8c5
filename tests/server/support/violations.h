// SPDX-License-Identifier: Apache-2.0
//
// Rules of a standard, each with bytes that break it or only just keep it, and the expected answer.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "server/transport/http2_session.h"
#include "tests/server/support/http2_bytes.h"

namespace attend::http2 {

// The server's reaction: a connection error, a stream error, or neither.
struct Verdict {
  enum class Kind { kTaken, kStream, kConnection };
  Kind kind = Kind::kTaken;
  uint32_t id = 0;  // of the stream
  uint32_t error = 0;

  bool operator==(const Verdict&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Verdict& verdict) {
    if (verdict.kind == Kind::kTaken) return out << "no error";
    out << nghttp2_http2_strerror(verdict.error) << " of ";
    if (verdict.kind == Kind::kConnection) return out << "the connection";
    return out << "stream " << verdict.id;
  }
};

inline Verdict Taken() { return {}; }
inline Verdict Stream(uint32_t id, uint32_t error) { return {Verdict::Kind::kStream, id, error}; }
inline Verdict Connection(uint32_t error) { return {Verdict::Kind::kConnection, 0, error}; }

struct Rule {
  std::string section;  // of the standard
  std::string name;
  std::string bytes;  // after the preface and the settings
  Verdict verdict;

  friend std::ostream& operator<<(std::ostream& out, const Rule& rule) {
    return out << rule.section << ": " << rule.name;
  }
};

// A session that answers no request.
class ViolationServer final : public Http2Session::Owner {
 public:
  static constexpr int32_t kWindowBytes = 1000;

  ViolationServer() {
    Http2Session::Limits limits;
    limits.streams_max = 4;
    limits.stream_window_bytes = kWindowBytes;
    limits.frame_bytes_max = 1 << 14;
    Http2Session::Owner& owner = *this;
    session_ = std::make_unique<Http2Session>(limits, owner, clock_);
  }

  // Passes the bytes in pieces. Returns the reaction.
  void Take(std::string_view bytes, size_t piece) {
    for (; !bytes.empty(); bytes.remove_prefix(std::min(piece, bytes.size()))) {
      if (!session_->Receive(bytes.substr(0, piece)).ok()) refused_ = true;
      if (!session_->Send().ok()) refused_ = true;
      Drop();
      if (refused_ || session_->over()) break;
    }
  }
  // The error sent: the connection's, or else that of the first stream.
  Verdict Told() const {
    Verdict verdict;
    std::string_view left = said_;
    while (left.size() >= 9) {
      const auto at = [&](size_t i) {
        return static_cast<uint32_t>(static_cast<uint8_t>(left[i]));
      };
      const auto number = [&](size_t i) {
        return at(i) << 24 | at(i + 1) << 16 | at(i + 2) << 8 | at(i + 3);
      };
      const size_t length = number(0) >> 8;
      const uint32_t type = at(3);
      if (type == NGHTTP2_GOAWAY) return Connection(number(9 + 4));
      if (type == NGHTTP2_RST_STREAM && verdict == Taken()) {
        verdict = Stream(number(5), number(9));
      }
      left.remove_prefix(9 + length);
    }
    return refused_ ? Connection(NGHTTP2_INTERNAL_ERROR) : verdict;
  }
  bool Served(uint32_t id) const { return requests_.contains(static_cast<int32_t>(id)); }

 private:
  struct Request final : Http2Stream {
    void OnData(std::string_view) override {}  // never consumed: so the window only closes
    void OnEnd() override {}
    void OnTaken(size_t) override {}
    void OnClose() override {}
  };

  Http2Stream* OnRequest(int32_t id, RequestHead&&) override {
    return (requests_[id] = std::make_unique<Request>()).get();
  }

  void Drop() {
    std::array<iovec, 1> first;
    while (session_->output().Fill(first) > 0) {
      said_.append(static_cast<const char*>(first[0].iov_base), first[0].iov_len);
      session_->output().Consume(first[0].iov_len);
    }
  }

  SteadyClock clock_;
  std::map<int32_t, std::unique_ptr<Request>> requests_;
  std::unique_ptr<Http2Session> session_;
  std::string said_;
  bool refused_ = false;
};

class Violations : public ::testing::TestWithParam<Rule> {
 protected:
  // The verdict does not depend on how the bytes are cut, and after anything but a connection error
  // the connection serves another request.
  static void Judge(const Rule& rule, std::string_view preface) {
    for (const size_t piece : {size_t{1} << 20, size_t{1}}) {
      ViolationServer server;
      server.Take(std::string(preface) + rule.bytes, piece);
      EXPECT_EQ(server.Told(), rule.verdict) << rule.section << ", in pieces of " << piece;
      if (rule.verdict.kind == Verdict::Kind::kConnection) continue;
      constexpr uint32_t kNext = 1001;
      server.Take(Headers(kNext, Fields()), piece);
      EXPECT_TRUE(server.Served(kNext)) << rule.section << ", in pieces of " << piece;
    }
  }
};

// "S5_1_1_EvenStream" of "5.1.1" and "even stream".
inline std::string NameOf(const ::testing::TestParamInfo<Rule>& info) {
  std::string name = "S";
  for (const char c : info.param.section) name += c == '.' ? '_' : c;
  name += '_';
  bool begins = true;
  for (const char c : info.param.name) {
    const bool letter = std::isalnum(static_cast<unsigned char>(c)) != 0;
    if (letter) name += static_cast<char>(begins ? std::toupper(static_cast<unsigned char>(c)) : c);
    begins = !letter;
  }
  return name;
}

}  // namespace attend::http2

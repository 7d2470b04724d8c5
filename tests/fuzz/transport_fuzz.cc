// SPDX-License-Identifier: Apache-2.0
//
// A connection to the server's own transport, from its bytes to its calls. The session does the
// same with the bytes in pieces of any size as with all of them at once; every call keeps the
// contract of ServerCall and is done soon after its connection has closed; memory stays within the
// connection's bounds.
//
// An input is the bytes that a client sends after its preface and settings. Mutations keep frames
// intact.

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "server/transport/http2_session.h"
#include "server/transport/http2_transport.h"
#include "tests/fuzz/fuzz.h"
#include "tests/server/support/http2_bytes.h"

namespace attend::fuzz {
namespace {

constexpr size_t kHeadBytes = 9;
constexpr int64_t kMessageBytesMax = 1000;
constexpr size_t kBigBytes = 100000;
// Bound on the memory of a connection with these limits, including what libraries keep.
constexpr int64_t kMemoryBytesMax = int64_t{4} << 20;

const std::string& Preface() {
  static const auto* const preface =
      new std::string(std::string(http2::kPreface) + http2::Settings() + http2::SettingsAck());
  return *preface;
}

Http2Session::Limits Limits() {
  Http2Session::Limits limits;
  limits.streams_max = 8;
  limits.header_list_bytes_max = 500;
  limits.stream_window_bytes = 2000;
  limits.frame_bytes_max = 1 << 14;
  limits.output_bytes_max = 1 << 16;
  limits.rates.empty = {.per_second = 64, .burst = 64};
  return limits;
}

class StillClock final : public Clock {
 public:
  TimePoint Now() const override { return TimePoint() + std::chrono::hours(1); }
};

// Records everything that a session reports for its bytes.
class Session final : private Http2Session::Owner {
 public:
  Session() : session_(Limits(), *static_cast<Http2Session::Owner*>(this), clock_) {}

  void Take(std::string_view bytes, size_t longest) {
    for (; !bytes.empty() && ok_; bytes.remove_prefix(std::min(longest, bytes.size()))) {
      ok_ = session_.Receive(bytes.substr(0, longest)).ok();
    }
    for (const auto& [id, stream] : streams_) {
      came_ += std::to_string(id) + stream->head + (stream->ended ? " ends " : " open ");
    }
    came_ += std::to_string(session_.frame_count()) + (ok_ ? "" : " refused");
  }
  const std::string& came() const { return came_; }
  // The streams' data may differ in length: how many bytes are delivered before a window is found
  // to be exceeded depends on the pieces.
  void RequireLike(const Session& other) const {
    ATTEND_FUZZ_REQUIRE(came_ == other.came_, came_ + "\n" + other.came_);
    for (const auto& [id, stream] : streams_) {
      const std::string& longer = other.streams_.at(id)->data;
      const size_t common = std::min(stream->data.size(), longer.size());
      ATTEND_FUZZ_REQUIRE(stream->data.substr(0, common) == longer.substr(0, common),
                          std::to_string(id));
    }
  }

 private:
  struct Stream final : Http2Stream {
    void OnData(std::string_view bytes) override { data.append(bytes); }
    void OnEnd() override { ATTEND_FUZZ_REQUIRE(!std::exchange(ended, true), "twice"); }
    void OnTaken(size_t) override {}
    void OnClose() override {}
    std::string head, data;
    bool ended = false;
  };

  Http2Stream* OnRequest(int32_t id, RequestHead&& head) override {
    auto stream = std::make_unique<Stream>();
    stream->head = head.method + " " + head.path + " " + head.timeout.value_or("");
    for (const auto& [key, value] : head.metadata) {
      stream->head.append(key).append(value);
    }
    const auto added = streams_.emplace(id, std::move(stream));
    ATTEND_FUZZ_REQUIRE(added.second, "a request again");
    return added.first->second.get();
  }

  StillClock clock_;
  std::map<int32_t, std::unique_ptr<Stream>> streams_;
  Http2Session session_;
  std::string came_;
  bool ok_ = true;
};

// Acts by the last letter of the path: 'e' echoes, 'b' sends big answers, 'r' refuses at once, 'h'
// holds the call until it is cancelled, 'd' ends it with the first message.
class Call final : public CallHandler {
 public:
  explicit Call(ServerCall& call) : call_(call), does_(call.path().back()) {
    if (does_ == 'r') {
      End(Status(Code::kPermissionDenied, "no\n%"));
    } else if (does_ != 'h') {
      Read();
    }
  }

  void OnMessage(InMessage message) override {
    Enter(&reading_);
    const std::string text = message.Text();
    ATTEND_FUZZ_REQUIRE(static_cast<int64_t>(text.size()) <= kMessageBytesMax, text);
    ATTEND_FUZZ_REQUIRE(!half_closed_, text);
    if (does_ == 'd') return End(Status());
    writing_ = true;
    call_.Write(OutMessage::Of(does_ == 'b' ? std::string(kBigBytes, 'b') : text));
  }
  void OnHalfClose() override {
    Enter(&reading_);
    half_closed_ = true;
    End(Status());
  }
  void OnWritten(bool) override {
    Enter(&writing_);
    if (!ended_) Read();
  }
  void OnCancel() override {
    ATTEND_FUZZ_REQUIRE(!std::exchange(cancelled_, true) && call_.cancelled(), "cancelled");
    if (!ended_) End(Status(Code::kCancelled, "cancelled"));
  }
  void OnDone() override {
    ATTEND_FUZZ_REQUIRE(ended_ && !writing_, "done");
    delete this;
  }

 private:
  // Requires that this callback was requested.
  void Enter(bool* asked) { ATTEND_FUZZ_REQUIRE(std::exchange(*asked, false), call_.path()); }
  void Read() {
    reading_ = true;
    call_.Read();
  }
  void End(const Status& status) {
    ended_ = true;
    reading_ = false;
    call_.Finish({status, {}});
  }

  ServerCall& call_;
  const char does_;
  bool reading_ = false, writing_ = false;
  bool half_closed_ = false, cancelled_ = false, ended_ = false;
};

class Methods final : public CallMethods {
 public:
  MessageBound MessageBoundOf(std::string_view) const override { return {kMessageBytesMax}; }
  CallHandler* Begin(ServerCall& call) override { return new Call(call); }
};

Http2Transport& Transport() {
  static auto* const transport = [] {
    static Methods methods;
    static SteadyClock clock;
    Http2Transport::Options options;
    options.connection.session = Limits();
    options.connection.calls_max = 16;
    auto started = Http2Transport::Start(options, methods, clock);
    ATTEND_FUZZ_REQUIRE(started.ok(), started.status().ToString());
    return started->release();
  }();
  return *transport;
}

// Sends the bytes, and waits until the server has closed its end.
void Converse(std::string_view bytes, std::mt19937_64& random) {
  std::array<int, 2> pair{-1, -1};
  ATTEND_FUZZ_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) == 0, "");
  UniqueFd ours(pair[0]), client(pair[1]);
  ATTEND_FUZZ_REQUIRE(fcntl(ours.get(), F_SETFL, O_NONBLOCK) == 0, "");
  Transport().Serve(std::make_unique<PlainChannel>(std::move(ours)), {.address = "fuzz:1"},
                    nullptr);
  const size_t longest = random() % 2 == 0 ? bytes.size() : 1 + random() % bytes.size();
  for (; !bytes.empty(); bytes.remove_prefix(std::min(longest, bytes.size()))) {
    const std::string_view piece = bytes.substr(0, longest);
    if (send(client.get(), piece.data(), piece.size(), MSG_NOSIGNAL) < 0) break;
  }
  shutdown(client.get(), SHUT_WR);
  std::array<char, 65536> answer;
  while (Receive(client.get(), answer.data(), answer.size()) > 0) {
  }
  // Calls that were posted to another thread are done once their post has run.
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (Transport().CountCalls() > 0) {
    ATTEND_FUZZ_REQUIRE(std::chrono::steady_clock::now() < until, "a call outlives its connection");
    std::this_thread::yield();
  }
}

// The frames of an input; the last one may be incomplete.
std::vector<std::string> Frames(std::string_view input) {
  std::vector<std::string> frames;
  while (!input.empty()) {
    size_t length = input.size();
    if (input.size() >= kHeadBytes) {
      const auto at = [&](size_t i) { return size_t{static_cast<uint8_t>(input[i])}; };
      length = std::min(length, kHeadBytes + (at(0) << 16 | at(1) << 8 | at(2)));
    }
    frames.emplace_back(input.substr(0, length));
    input.remove_prefix(length);
  }
  return frames;
}

// The input up to the first GOAWAY: whether nghttp2 still processes later frames depends on whether
// they arrive in the same piece.
std::string_view UntilGoaway(std::string_view input) {
  size_t bytes = 0;
  for (const std::string& frame : Frames(input)) {
    bytes += frame.size();
    if (frame.size() >= kHeadBytes && frame[3] == NGHTTP2_GOAWAY) break;
  }
  return input.substr(0, bytes);
}

// A valid frame of a random type and stream.
std::string RandomFrame(std::mt19937_64& random) {
  const auto id = static_cast<uint32_t>(random() % 12);
  const auto flags = static_cast<uint8_t>(random() % 2 == 0 ? random() % 64 : random() % 2);
  switch (random() % 8) {
    case 0:
      return http2::Open(2 * id + 1);
    case 1:
      return http2::WindowUpdate(id, static_cast<uint32_t>(random() >> (33 + random() % 31)));
    case 2:
      return http2::Reset(id);
    case 3:
      return http2::Setting(static_cast<uint16_t>(random() % 8),
                            static_cast<uint32_t>(random() >> (32 + random() % 32)));
    case 4:
      return http2::Continuation(id, http2::Field("a", "b"), flags);
    case 5:
      return http2::Frame(NGHTTP2_PING, flags, 0, "draining");
    default:
      return http2::Data(id, http2::Number(random() % 3, 5) + "ab", flags);
  }
}

void MutateFrame(std::string& frame, std::mt19937_64& random) {
  if (frame.size() < kHeadBytes) return;
  switch (random() % 6) {
    case 0:
      frame[3] = static_cast<char>(random() % 12);
      return;
    case 1:
      frame[4] = static_cast<char>(frame[4] ^ (1 << (random() % 8)));
      return;
    case 2:
      frame[8] = static_cast<char>(random() % 24);
      return;
    case 3:
      frame[random() % 3] = static_cast<char>(random());  // a wrong length
      return;
    default: {
      std::string payload = frame.substr(kHeadBytes);
      const size_t size = payload.size();
      payload.resize(size + 1 + random() % 64);
      payload.resize(
          LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(payload.data()), size, payload.size()));
      frame = http2::Number(payload.size(), 3) + frame.substr(3, kHeadBytes - 3) + payload;
    }
  }
}

}  // namespace
}  // namespace attend::fuzz

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t size_max,
                                          unsigned seed) {
  using namespace attend::fuzz;
  std::mt19937_64 random(seed);
  std::vector<std::string> frames = Frames(View(data, size));
  if (frames.empty() || random() % 8 == 0) return LLVMFuzzerMutate(data, size, size_max);
  const auto at = [&] { return frames.begin() + static_cast<ptrdiff_t>(random() % frames.size()); };
  switch (random() % 6) {
    case 0:
      frames.insert(at(), RandomFrame(random));
      break;
    case 1:
      frames.insert(at(), std::string(*at()));
      break;
    case 2:
      if (frames.size() > 1) frames.erase(at());
      break;
    case 3:
      std::swap(*at(), *at());
      break;
    default:
      MutateFrame(*at(), random);
  }
  std::string changed;
  for (const std::string& frame : frames) changed += frame;
  if (changed.size() > size_max) return LLVMFuzzerMutate(data, size, size_max);
  changed.copy(reinterpret_cast<char*>(data), changed.size());
  return changed.size();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace attend::fuzz;
  const std::string bytes = Preface() + std::string(View(data, size));
  std::mt19937_64 random = RandomOf(bytes);
  Transport();
  const MemoryPeak peak;
  {
    const std::string all = Preface() + std::string(UntilGoaway(View(data, size)));
    Session whole, pieces;
    whole.Take(all, all.size());
    pieces.Take(all, 1 + random() % 16);
    whole.RequireLike(pieces);
  }
  Converse(bytes, random);
  ATTEND_FUZZ_REQUIRE(peak.bytes() <= kMemoryBytesMax, std::to_string(peak.bytes()));
  return 0;
}

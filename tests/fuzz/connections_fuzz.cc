// SPDX-License-Identifier: Apache-2.0
//
// What comes on a connection before it is a message: HTTP/2 frames, whose heads are looked at
// before gRPC reads them, and requests to the metrics endpoint. Frames give the same verdict in
// pieces of any size, and it is the one that the bounds ask for; whether a message stalls is what
// reading it whole says; an HTTP request is answered in one way.
//
// An input is what a client sent. It is also a whole conversation: frames whose stream has the
// reserved bit set are the server's, and a frame comes as often as its first byte says.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <prometheus/registry.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/app/metrics_endpoint.h"
#include "server/metrics/tls_metrics.h"
#include "server/net/http2_frames.h"
#include "tests/fuzz/conversation.h"
#include "tests/fuzz/fuzz.h"

namespace attend::fuzz {
namespace {

constexpr int64_t kStreamsMax = 4;
constexpr int64_t kCallsMax = 6;

Http2Frames::Limits Limits(bool short_of_memory) {
  Http2Frames::Limits limits;
  limits.streams = kStreamsMax;
  limits.calls = std::make_shared<OpenCalls>(kCallsMax, kCallsMax)->Of("");
  if (!short_of_memory) return limits;
  // A little above its bound: all of a connection's calls are allowed.
  constexpr int64_t kGrowth = int64_t{1} << 30;
  static const SteadyClock clock;
  const auto grown = [heap = int64_t{0}]() mutable { return std::exchange(heap, kGrowth + 1); };
  limits.heap = std::make_shared<HeapPressure>(kGrowth, 0, clock, grown);
  return limits;
}

// The number of heads that pass. How many bytes come before the next head ends, `run_ahead` says of
// how many there are; they come in pieces of at most `longest`.
template <class RunAhead>
size_t CountPassing(const Conversation& conversation, bool short_of_memory, size_t longest,
                    const RunAhead& run_ahead) {
  Http2Frames frames(Limits(short_of_memory));
  std::array<size_t, 2> came{};
  const auto come = [&](int side, size_t until) {
    const auto i = static_cast<size_t>(side);
    while (came[i] < until) {
      const size_t step = std::min(longest, until - came[i]);
      const std::span<const uint8_t> piece(Bytes(conversation.bytes[i]) + came[i], step);
      came[i] += step;
      if (side == Conversation::kServer) {
        frames.Written(piece);
      } else if (frames.Read(piece, TimePoint())) {
        return false;
      }
    }
    return true;
  };
  for (size_t n = 0; n < conversation.heads.size(); ++n) {
    const Conversation::Head& head = conversation.heads[n];
    if (!come(head.side, head.end)) return n;
    const bool passes = come(head.side, head.end + run_ahead(head.ahead - head.end));
    ATTEND_FUZZ_REQUIRE(passes, "between two heads");
  }
  return conversation.heads.size();
}

// What the bounds say, where time stands still.
class Bounds {
 public:
  explicit Bounds(bool short_of_memory) : short_of_memory_(short_of_memory) {}

  // Whether they hold with this head too.
  bool Hold(const uint8_t* head, int side) {
    const int64_t length = FrameHeads::Length(head);
    const int type = head[3];
    const int flags = head[4];
    if (side == Conversation::kServer) {
      CountServers(head);
      return true;
    }
    const bool begins = type == kHeaders && Begins(FrameHeads::Stream(head));
    if (type == kHeaders || type == kContinuation) {
      CountHeaders(head);
    } else if (type == kWindowUpdate) {
      const int64_t granted = Http2Frames::kUpdatesPerFrame * (streams_ + answers_) +
                              answer_bytes_ / Http2Frames::kBytesPerUpdate;
      ++(updates_ < granted ? updates_ : idle_);
    } else if (type == kReset) {
      resets_ += open_.erase(FrameHeads::Stream(head)) == 0 ? 1 : 0;
    } else if (type != kData) {
      ++idle_;
    } else if (length < Http2Frames::kDataBytesMin) {
      ++((flags & 1) != 0 && ends_ < streams_ ? ends_ : idle_);
    }
    acknowledged_ |= type == kSettings && (flags & 1) != 0;
    constexpr int kTaken[] = {0x01, 0x25, 0xff, 0, 0x01, 0xff, 0x01, 0, 0, 0x04};
    const bool known = type >= std::ssize(kTaken) || (flags & ~kTaken[type]) == 0;
    const bool hold =
        known && header_bytes_ <= Http2Frames::kHeaderBytesMax &&
        header_frames_ <= Http2Frames::kHeaderFramesMax && unacknowledged_ <= kStreamsMax &&
        idle_ <= Http2Frames::kIdleFramesMax && resets_ <= Http2Frames::kResetsMax &&
        std::ssize(open_) <= kCallsMax &&
        (!short_of_memory_ || !begins || streams_ - answers_ - refusals_ <= kStreamsMax);
    if (ends_headers_) header_bytes_ = header_frames_ = 0;
    return hold;
  }

 private:
  static constexpr int kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kWindowUpdate = 8,
                       kContinuation = 9;

  bool Begins(int64_t stream) const { return stream > last_stream_ && stream % 2 == 1; }

  void CountServers(const uint8_t* head) {
    const int64_t stream = FrameHeads::Stream(head);
    const int type = head[3];
    if (type == kData) {
      ++answers_;
      answer_bytes_ += FrameHeads::Length(head);
      answered_ = stream;
    }
    const bool ends = type == kReset || (type <= kHeaders && (head[4] & 1) != 0);
    const bool was_open = ends && open_.erase(stream) > 0;
    if (type == kReset) {
      refusals_ -= refused_ == stream ? 1 : 0;
      refused_ = -1;
    } else if (was_open && stream != answered_) {
      ++refusals_;
      refused_ = stream;
    }
  }

  void CountHeaders(const uint8_t* head) {
    if (head[3] == kHeaders) {
      header_bytes_ = header_frames_ = 0;
      const int64_t stream = FrameHeads::Stream(head);
      if (Begins(stream)) {
        last_stream_ = stream;
        ++streams_;
        open_.insert(stream);
        unacknowledged_ += acknowledged_ ? 0 : 1;
      } else {
        ++idle_;
      }
    }
    header_bytes_ += FrameHeads::Length(head);
    ++header_frames_;
    ends_headers_ = (head[4] & 4) != 0;
  }

  const bool short_of_memory_;
  bool acknowledged_ = false;
  bool ends_headers_ = false;
  int64_t header_bytes_ = 0, header_frames_ = 0;
  int64_t last_stream_ = 0, streams_ = 0, unacknowledged_ = 0;
  int64_t idle_ = 0, updates_ = 0, ends_ = 0;
  int64_t resets_ = 0;
  int64_t answers_ = 0, answer_bytes_ = 0, refusals_ = 0;
  int64_t answered_ = 0, refused_ = -1;  // the last streams
  std::set<int64_t> open_;
};

// That the first head which did not pass is the first with which the bounds do not hold.
void RequireBounds(const Conversation& conversation, bool short_of_memory, size_t passing) {
  Bounds bounds(short_of_memory);
  for (size_t n = 0; n < conversation.heads.size() && n <= passing; ++n) {
    const Conversation::Head& head = conversation.heads[n];
    const bool hold = bounds.Hold(conversation.At(head), head.side);
    ATTEND_FUZZ_REQUIRE(hold == (n < passing), std::to_string(n));
  }
}

// Whether a client's bytes pass, in pieces of at most `longest`.
bool Passes(std::string_view bytes, size_t longest, std::span<const MethodBound> bounds = {}) {
  Http2Frames::Limits limits = Limits(false);
  limits.method_bounds = bounds;
  Http2Frames frames(limits);
  while (!bytes.empty()) {
    const size_t step = std::min(longest, bytes.size());
    if (frames.Read({Bytes(bytes), step}, TimePoint())) return false;
    bytes.remove_prefix(step);
  }
  return true;
}

// That messages stall as they do if they are read whole.
void RequireStalls(const Conversation& conversation, size_t longest) {
  constexpr auto kTimeout = std::chrono::seconds(1);
  Http2Frames::Limits limits = Limits(false);
  limits.use = std::make_shared<ConnectionUse>();
  Http2Frames frames(limits);
  Messages messages;
  std::array<size_t, 2> came{};
  TimePoint now;
  for (const Conversation::Head& head : conversation.heads) {
    const std::string_view bytes = conversation.bytes[static_cast<size_t>(head.side)];
    const uint8_t* const at = conversation.At(head);
    const auto length = static_cast<size_t>(FrameHeads::Length(at));
    const std::string_view payload = bytes.substr(head.end, length);
    size_t& from = came[static_cast<size_t>(head.side)];
    while (from < head.end + payload.size()) {
      const size_t step = std::min(longest, head.end + payload.size() - from);
      const std::span<const uint8_t> piece(Bytes(bytes) + from, step);
      from += step;
      if (head.side == Conversation::kServer) {
        frames.Written(piece);
      } else if (frames.Read(piece, now)) {
        return;
      }
    }
    messages.Count(head.side, at, payload);
    now += kTimeout;
    ATTEND_FUZZ_REQUIRE(limits.use->messages->Stall(now, kTimeout) == messages.Stall(),
                        std::to_string(&head - conversation.heads.data()));
  }
}

void ReadFrames(std::string_view input) {
  const Conversation alone = Read(input, false);
  const auto late = [](size_t) { return size_t{0}; };
  const size_t passing = CountPassing(alone, false, input.size(), late);
  RequireBounds(alone, false, passing);
  for (const size_t longest : {input.size(), size_t{1}, size_t{7}}) {
    ATTEND_FUZZ_REQUIRE(Passes(input, longest) == (passing == alone.heads.size()),
                        std::to_string(longest));
  }
}

// Nothing that was wrong before is right because headers are read, and pieces change nothing.
void ReadHeaders(std::string_view input) {
  static const MethodBound kBounds[] = {
      {"/a", 40}, {"/b", MethodBound::kUnbounded, 40}, {"/grpc.health.v1.Health/Check", 4096}};
  const bool passes = Passes(input, input.size(), kBounds);
  ATTEND_FUZZ_REQUIRE(!passes || Passes(input, input.size()), "right by its headers");
  for (const size_t longest : {size_t{1}, size_t{7}}) {
    ATTEND_FUZZ_REQUIRE(Passes(input, longest, kBounds) == passes, std::to_string(longest));
  }
}

void ReadConversation(std::string_view input) {
  const Conversation both = Read(input, true);
  const auto late = [](size_t) { return size_t{0}; };
  const auto early = [](size_t bytes) { return bytes; };
  std::mt19937_64 random = RandomOf(input);
  const auto sometimes = [&random](size_t bytes) { return random() % (bytes + 1); };
  const size_t passing =
      CountPassing(both, true, both.bytes[0].size() + both.bytes[1].size(), late);
  RequireBounds(both, true, passing);
  ATTEND_FUZZ_REQUIRE(CountPassing(both, true, 4096, early) == passing, "early");
  ATTEND_FUZZ_REQUIRE(CountPassing(both, true, 5, sometimes) == passing, "at random");
  for (const size_t longest : {size_t{1} << 20, size_t{1}, size_t{7}}) {
    RequireStalls(both, longest);
  }
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
    static const auto logger = MakeLogger({.level = LogLevel::off, .file = {}, .options = {}});
    ATTEND_FUZZ_REQUIRE(logger.ok(), logger.status().ToString());
    static prometheus::Registry registry;
    static TlsMetrics tls_metrics(registry);
    auto started = MetricsEndpoint::Start(
        {.address = "127.0.0.1:0", .ready = [] { return true; }, .ailment = [] { return nullptr; }},
        {}, tls_metrics, **logger);
    ATTEND_FUZZ_REQUIRE(started.ok(), started.status().ToString());
    return started->release();
  }();
  const std::string answer = Ask(endpoint->port(), input);
  if (answer.empty()) return;  // it was no whole request
  const bool known = answer.starts_with("HTTP/1.1 200 ") || answer.starts_with("HTTP/1.1 404 ") ||
                     answer.starts_with("HTTP/1.1 405 ") || answer.starts_with("HTTP/1.1 431 ");
  ATTEND_FUZZ_REQUIRE(known && answer.find("\r\n\r\n") != answer.npos, answer);
  if (answer.starts_with("HTTP/1.1 200 ")) {
    const std::string_view path = input.substr(input.find(' ') + 1);
    ATTEND_FUZZ_REQUIRE(
        path.starts_with("/metrics") || path.starts_with("/healthz") || path.starts_with("/readyz"),
        std::string(input));
  }
}

}  // namespace
}  // namespace attend::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = attend::fuzz::View(data, size);
  if (input.empty()) return 0;
  attend::fuzz::ReadFrames(input);
  attend::fuzz::ReadHeaders(input);
  attend::fuzz::ReadConversation(input);
  // What begins like no request costs no connection, or all of the time would go there.
  if (input.starts_with("GET ") || input.starts_with("HEAD ")) attend::fuzz::AskMetrics(input);
  return 0;
}

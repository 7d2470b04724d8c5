// SPDX-License-Identifier: Apache-2.0
//
// RFC 9113, sections 3 to 6: frames, streams and flow control. A server may treat a stream error as
// a connection error (5.4.1). The table notes where nghttp2 does so, and where it does the reverse.

#include "tests/server/support/violations.h"

namespace attend::http2 {
namespace {

constexpr uint32_t kMost = 0x7fffffff;  // of a window

std::string Zeros(size_t bytes) { return std::string(bytes, '\0'); }

class Rfc9113Frames : public Violations {};
class Rfc9113Begin : public Violations {};

TEST_P(Rfc9113Begin, IsAnswered) { Judge(GetParam(), ""); }
TEST_P(Rfc9113Frames, AreAnswered) {
  Judge(GetParam(), std::string(kPreface) + Settings() + SettingsAck());
}

const Rule kBegin[] = {
    {"3.4", "another preface", "GET / HTTP/1.1\r\nhost: test\r\n\r\n",
     Connection(NGHTTP2_INTERNAL_ERROR)},
    {"3.4", "preface of a later version", "PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n",
     Connection(NGHTTP2_INTERNAL_ERROR)},
    {"3.4", "no settings first", std::string(kPreface) + Whole(1),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"3.4", "acknowledgement first", std::string(kPreface) + SettingsAck(),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"3.4", "request before the server's settings are known",
     std::string(kPreface) + Settings() + Whole(1), Taken()},
};
INSTANTIATE_TEST_SUITE_P(Section3, Rfc9113Begin, ::testing::ValuesIn(kBegin), NameOf);

const Rule kFrames[] = {
    {"4.1", "reserved bit", Headers(0x80000001, Fields()), Taken()},
    {"4.1", "unknown flags", Headers(1, Fields(), kEndHeaders | kEndStream | 0xd2), Taken()},
    {"4.1", "unknown type", Frame(0x42, 0xff, 7, "bytes"), Taken()},
    {"4.2", "frame beyond the largest", Open(1) + Head((1 << 14) + 1, NGHTTP2_DATA, 0, 1),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"4.2", "unknown frame beyond the largest", Head((1 << 14) + 1, 0x42, 0, 0),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"4.2", "headers beyond the largest frame", Head((1 << 14) + 1, NGHTTP2_HEADERS, 4, 1),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"4.3", "block cut off", Headers(1, Fields().substr(0, 20)),
     Connection(NGHTTP2_COMPRESSION_ERROR)},
    {"4.3", "data between two parts of a block",
     Headers(1, Fields().substr(0, 20), 0) + Data(1, "x"), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"4.3", "headers of another stream between two parts of a block",
     Headers(1, Fields().substr(0, 20), 0) + Whole(3), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"4.3", "ping between two parts of a block",
     Headers(1, Fields().substr(0, 20), 0) + Frame(NGHTTP2_PING, 0, 0, Zeros(8)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.5", "unknown frame between two parts of a block",
     Headers(1, Fields().substr(0, 20), 0) + Frame(0x42, 0, 1, ""),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
};
INSTANTIATE_TEST_SUITE_P(Section4, Rfc9113Frames, ::testing::ValuesIn(kFrames), NameOf);

const Rule kStreams[] = {
    {"5.1", "data on an idle stream", Data(5, "x"), Connection(NGHTTP2_PROTOCOL_ERROR)},
    // Ignored, although the rule makes it a connection error: gRPC's clients send it.
    {"5.1", "reset of an idle stream", Reset(5), Taken()},
    {"5.1", "reset of an idle stream that is the server's", Reset(6),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.1", "reset of an idle stream, of three bytes", Frame(NGHTTP2_RST_STREAM, 0, 5, Zeros(3)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"5.1", "reset of an idle stream that begins then", Reset(5) + Whole(5), Taken()},
    {"5.1", "window of an idle stream", WindowUpdate(5, 1), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.1", "priority of an idle stream", Frame(NGHTTP2_PRIORITY, 0, 5, Zeros(5)), Taken()},
    // A connection error, although the rule makes it a stream error.
    {"5.1", "data on a half closed stream", Whole(1) + Data(1, "x"),
     Connection(NGHTTP2_STREAM_CLOSED)},
    {"5.1", "headers on a half closed stream", Whole(1) + Whole(1),
     Connection(NGHTTP2_STREAM_CLOSED)},
    {"5.1", "window of a half closed stream", Whole(1) + WindowUpdate(1, 1), Taken()},
    {"5.1", "reset of a half closed stream", Whole(1) + Reset(1), Taken()},
    {"5.1", "data on a stream that was reset", Open(1) + Reset(1) + Data(1, "x"), Taken()},
    {"5.1", "headers on a stream that was reset", Open(1) + Reset(1) + Whole(1), Taken()},
    {"5.1", "window of a stream that was reset", Open(1) + Reset(1) + WindowUpdate(1, 1), Taken()},
    {"5.1", "priority of a closed stream",
     Open(1) + Reset(1) + Frame(NGHTTP2_PRIORITY, 0, 1, Zeros(5)), Taken()},
    {"5.1.1", "even stream", Whole(2), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.1.1", "stream below an earlier one", Open(5) + Open(3), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.1.1", "ids left out", Whole(101), Taken()},
    {"5.1.1", "trailers on a stream of a client that leaves out ids",
     Open(5) + Headers(5, Field("done", "1")), Taken()},
    // A connection error, although the rule makes it a stream error.
    {"5.1.2", "one stream too many", Open(1) + Open(3) + Open(5) + Open(7) + Open(9),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.1.2", "as many streams as may be", Open(1) + Open(3) + Open(5), Taken()},
    {"5.3.1", "stream that depends on itself",
     Headers(1, Number(1, 4) + '\20' + Fields(), kEndHeaders | kEndStream | kPriority),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"5.4.2", "reset that answers a reset", Open(1) + Reset(1) + Reset(1), Taken()},
};
INSTANTIATE_TEST_SUITE_P(Section5, Rfc9113Frames, ::testing::ValuesIn(kStreams), NameOf);

const Rule kDataAndHeaders[] = {
    {"6.1", "data of no stream", Data(0, "x"), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.1", "padding", Open(1) + Data(1, "\3abc" + Zeros(3), kPadded | kEndStream), Taken()},
    {"6.1", "padding of nothing", Open(1) + Data(1, "\3" + Zeros(3), kPadded | kEndStream),
     Taken()},
    {"6.1", "padding as long as the frame", Open(1) + Data(1, "\4" + Zeros(3), kPadded),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.1", "padded frame without its length", Open(1) + Data(1, "", kPadded),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.2", "headers of no stream", Whole(0), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.2", "padding", Headers(1, "\5" + Fields() + Zeros(5), kEndHeaders | kEndStream | kPadded),
     Taken()},
    {"6.2", "padding and priority",
     Headers(1, "\5" + Zeros(5) + Fields() + Zeros(5),
             kEndHeaders | kEndStream | kPadded | kPriority),
     Taken()},
    {"6.2", "padding as long as the frame",
     Headers(1, "\4" + Zeros(3), kEndHeaders | kEndStream | kPadded),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.2", "padding that reaches into the priority",
     Headers(1, "\4" + Zeros(5) + Zeros(3), kEndHeaders | kEndStream | kPadded | kPriority),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.2", "priority cut off", Headers(1, Zeros(4), kEndHeaders | kEndStream | kPriority),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.3", "priority of no stream", Frame(NGHTTP2_PRIORITY, 0, 0, Zeros(5)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.3", "priority of a stream that depends on itself",
     Frame(NGHTTP2_PRIORITY, 0, 1, Number(1, 4) + Zeros(1)), Connection(NGHTTP2_PROTOCOL_ERROR)},
    // A connection error, although the rule makes it a stream error.
    {"6.3", "priority of four bytes", Frame(NGHTTP2_PRIORITY, 0, 1, Zeros(4)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.4", "reset of no stream", Reset(0), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.4", "reset of three bytes", Open(1) + Frame(NGHTTP2_RST_STREAM, 0, 1, Zeros(3)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.4", "reset of five bytes", Open(1) + Frame(NGHTTP2_RST_STREAM, 0, 1, Zeros(5)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"7", "reset for an unknown error", Open(1) + Reset(1, 0xdeadbeef), Taken()},
};
INSTANTIATE_TEST_SUITE_P(Section6DataAndHeaders, Rfc9113Frames,
                         ::testing::ValuesIn(kDataAndHeaders), NameOf);

const Rule kSettings[] = {
    {"6.5", "settings of a stream", Frame(NGHTTP2_SETTINGS, 0, 1, ""),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.5", "settings of five bytes", Settings(Zeros(5)), Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.5", "acknowledgement with a setting",
     Frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0, Zeros(6)), Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.5.3", "a setting twice, of which the second counts",
     Settings(Number(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 2) + Number(kMost, 4) +
              Number(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 2) + Number(1, 4)) +
         Open(1) + WindowUpdate(1, kMost - 1),
     Taken()},
    {"6.5.2", "unknown setting", Setting(0x4242, 7), Taken()},
    {"6.5.2", "table of no bytes", Setting(NGHTTP2_SETTINGS_HEADER_TABLE_SIZE, 0), Taken()},
    {"6.5.2", "push of two", Setting(NGHTTP2_SETTINGS_ENABLE_PUSH, 2),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.5.2", "window beyond the largest", Setting(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kMost + 1),
     Connection(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6.5.2", "largest window", Setting(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kMost), Taken()},
    {"6.5.2", "frames below the smallest", Setting(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, (1 << 14) - 1),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.5.2", "frames beyond the largest", Setting(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, 1 << 24),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.5.2", "largest frames", Setting(NGHTTP2_SETTINGS_MAX_FRAME_SIZE, (1 << 24) - 1), Taken()},
    {"6.5.3", "acknowledgement of nothing", SettingsAck(), Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.6", "push by a client",
     Open(1) + Frame(NGHTTP2_PUSH_PROMISE, kEndHeaders, 1, Number(2, 4) + Fields()),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
};
INSTANTIATE_TEST_SUITE_P(Section6Settings, Rfc9113Frames, ::testing::ValuesIn(kSettings), NameOf);

const Rule kRest[] = {
    {"6.7", "ping of a stream", Frame(NGHTTP2_PING, 0, 1, Zeros(8)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.7", "ping of seven bytes", Frame(NGHTTP2_PING, 0, 0, Zeros(7)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.7", "answer to no ping", Frame(NGHTTP2_PING, NGHTTP2_FLAG_ACK, 0, Zeros(8)), Taken()},
    {"6.8", "goaway of a stream", Frame(NGHTTP2_GOAWAY, 0, 1, Zeros(8)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.8", "goaway, after which the client's streams go on",
     Open(1) + Frame(NGHTTP2_GOAWAY, 0, 0, Zeros(8)) + Data(1, "x", kEndStream), Taken()},
    {"7", "goaway for an unknown error",
     Open(1) + Frame(NGHTTP2_GOAWAY, 0, 0, Zeros(4) + Number(~0u, 4)), Taken()},
    {"6.8", "goaway of seven bytes", Frame(NGHTTP2_GOAWAY, 0, 0, Zeros(7)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.9", "window update of three bytes", Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, Zeros(3)),
     Connection(NGHTTP2_FRAME_SIZE_ERROR)},
    {"6.9", "window update of nothing", WindowUpdate(0, 0), Connection(NGHTTP2_PROTOCOL_ERROR)},
    // A connection error, although the rule makes it a stream error.
    {"6.9", "window update of nothing for a stream", Open(1) + WindowUpdate(1, 0),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.9", "window update with the reserved bit", Open(1) + WindowUpdate(1, 0x80000001), Taken()},
    {"6.9.1", "window beyond the largest", WindowUpdate(0, kMost),
     Connection(NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6.9.1", "window of a stream beyond the largest", Open(1) + WindowUpdate(1, kMost),
     Stream(1, NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6.9.1", "data to the end of the window",
     Open(1) + Data(1, Zeros(ViolationServer::kWindowBytes)), Taken()},
    {"6.9.1", "data beyond the window", Open(1) + Data(1, Zeros(ViolationServer::kWindowBytes + 1)),
     Stream(1, NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6.9.1", "padding beyond the window",
     Open(1) + Data(1, Zeros(ViolationServer::kWindowBytes - 1)) +
         Data(1, "\1" + Zeros(1), kPadded),
     Stream(1, NGHTTP2_FLOW_CONTROL_ERROR)},
    // A stream error, although the rule makes it a connection error.
    {"6.9.2", "settings that take a window beyond the largest",
     Open(1) + WindowUpdate(1, kMost - 65535) +
         Setting(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 65536),
     Stream(1, NGHTTP2_FLOW_CONTROL_ERROR)},
    {"6.9.2", "settings that take a window below nothing",
     Open(1) + Setting(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 0), Taken()},
    {"6.10", "continuation of nothing", Open(1) + Continuation(1, ""),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.10", "continuation on another stream",
     Headers(1, Fields().substr(0, 20), kEndStream) + Continuation(3, Fields().substr(20)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.10", "continuation of no stream",
     Headers(1, Fields().substr(0, 20), kEndStream) + Continuation(0, Fields().substr(20)),
     Connection(NGHTTP2_PROTOCOL_ERROR)},
    {"6.10", "headers in three parts",
     Headers(1, Fields().substr(0, 20), kEndStream) + Continuation(1, Fields().substr(20, 9), 0) +
         Continuation(1, Fields().substr(29)),
     Taken()},
};
INSTANTIATE_TEST_SUITE_P(Section6Rest, Rfc9113Frames, ::testing::ValuesIn(kRest), NameOf);

}  // namespace
}  // namespace attend::http2

// SPDX-License-Identifier: Apache-2.0

#include "server/net/http2_frames.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>

#include "server/memory/memory_reserve.h"

namespace attend {
namespace {

constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kWindowUpdate = 8,
                  kContinuation = 9;
constexpr uint8_t kAck = 0x1, kEndStream = 0x1, kEndHeaders = 0x4, kPriorityFields = 0x20;

// Whether gRPC reads the frame as one without these flags would be read, or skips it whole. PADDED
// is none that it takes: it decodes the padding of HEADERS as headers, and drops DATA that have it,
// so that what is read here and what gRPC runs would be two things. Of the other types HTTP/2
// defines no more flags than these.
bool TakesFlags(uint8_t type, uint8_t flags) {
  constexpr uint8_t kSkipped = 0xff;
  // DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE and
  // CONTINUATION.
  constexpr uint8_t kTaken[] = {kEndStream, kEndStream | kEndHeaders | kPriorityFields,
                                kSkipped,   0,
                                kAck,       kSkipped,
                                kAck,       0,
                                0,          kEndHeaders};
  return type >= std::size(kTaken) || (flags & ~kTaken[type]) == 0;
}

}  // namespace

bool FrameRate::Count(TimePoint now) {
  const std::chrono::duration<double> since = now - since_;
  const double per_second = static_cast<double>(per_second_);
  const double back = std::min(since.count() * per_second, static_cast<double>(most_));
  if (back >= 1) {
    frames_ = std::max<int64_t>(0, frames_ - static_cast<int64_t>(back));
    // What is left of a frame counts next time.
    const std::chrono::duration<double> left((back - std::floor(back)) / per_second);
    since_ = now - std::chrono::duration_cast<Duration>(left);
  }
  return ++frames_ <= most_;
}

Http2Frames::Http2Frames(const Limits& limits)
    : limits_(limits),
      messages_(limits.use != nullptr ? limits.use->messages : std::make_shared<CallMessages>()) {
  if (!limits.method_bounds.empty()) headers_.emplace(limits.method_bounds);
}

const char* Http2Frames::Read(std::span<const uint8_t> bytes, TimePoint now) {
  read_bytes_ += std::ssize(bytes);
  return read_.Read(
      bytes, [&](const uint8_t* head) { return Begin(head, now); },
      [&](std::span<const uint8_t> piece) { return ReadPayload(piece, now); });
}

const char* Http2Frames::ReadPayload(std::span<const uint8_t> bytes, TimePoint now) {
  if (reading_ == kData) return messages_->Add(reading_stream_, bytes, now, read_bytes_);
  if (!headers_ || (reading_ != kHeaders && reading_ != kContinuation)) return nullptr;
  if (const char* const wrong = headers_->Read(bytes)) return wrong;
  BoundStream();
  return nullptr;
}

void Http2Frames::BoundStream() {
  const MethodBound* const bound = headers_->found();
  if (bound != nullptr) messages_->Bound(reading_stream_, *bound);
}

Http2Frames::~Http2Frames() {
  const int64_t open = messages_->CloseAll();
  if (limits_.calls != nullptr) limits_.calls->End(open);
}

void Http2Frames::Written(std::span<const uint8_t> bytes) {
  written_.Read(
      bytes,
      [this](const uint8_t* head) -> const char* {
        CountWritten(head);
        return nullptr;
      },
      [this](std::span<const uint8_t> piece) -> const char* {
        if (writing_ == kSettings || writing_ == kWindowUpdate) ReadGrant(piece);
        return nullptr;
      });
}

void Http2Frames::ReadGrant(std::span<const uint8_t> bytes) {
  constexpr int32_t kUpdateBytes = 4, kSettingBytes = 6;
  constexpr uint64_t kFirstWindow = 4;  // this setting's number
  for (const uint8_t byte : bytes) {
    grant_ = grant_ << 8 | byte;
    if (++grant_bytes_ < (writing_ == kSettings ? kSettingBytes : kUpdateBytes)) continue;
    const auto number = static_cast<int64_t>(grant_ & 0x7fffffff);
    if (writing_ == kWindowUpdate) {
      messages_->Grant(writing_stream_, number);
    } else if (grant_ >> 32 == kFirstWindow) {
      messages_->SetFirstWindow(number);
    }
    grant_ = 0;
    grant_bytes_ = 0;
  }
}

void Http2Frames::CountWritten(const uint8_t* head) {
  const int32_t stream = FrameHeads::Stream(head);
  const uint8_t type = head[3];
  writing_ = type;
  writing_stream_ = stream;
  grant_ = 0;
  grant_bytes_ = 0;
  if (type == kData) {
    answers_.fetch_add(1, std::memory_order_relaxed);
    answer_bytes_.fetch_add(FrameHeads::Length(head), std::memory_order_relaxed);
    answered_stream_ = stream;
  }
  const bool ends = (type == kData || type == kHeaders) && (head[4] & kEndStream) != 0;
  if (ends && Close(stream) && stream != answered_stream_) {
    refusals_.fetch_add(1, std::memory_order_relaxed);
    refused_stream_ = stream;
  }
  if (type != kReset) return;
  Close(stream);
  // So gRPC ends calls that the server has not come to and whose memory is still held.
  if (stream == refused_stream_) refusals_.fetch_sub(1, std::memory_order_relaxed);
  refused_stream_ = -1;
}

const char* Http2Frames::Open(int32_t stream) {
  if (limits_.calls != nullptr) {
    if (const char* const wrong = limits_.calls->Begin()) return wrong;
  }
  if (TryAllocating([&] { messages_->Open(stream); })) return nullptr;
  if (limits_.calls != nullptr) limits_.calls->End(1);
  return "no memory for another call";
}

bool Http2Frames::Close(int32_t stream) {
  if (!messages_->Close(stream)) return false;
  if (limits_.calls != nullptr) limits_.calls->End(1);
  return true;
}

const char* Http2Frames::Begin(const uint8_t* head, TimePoint now) {
  const int32_t length = FrameHeads::Length(head);
  const uint8_t type = head[3];
  const uint8_t flags = head[4];
  reading_ = type;
  reading_stream_ = FrameHeads::Stream(head);
  if (!TakesFlags(type, flags)) return "a frame with flags that gRPC does not take";
  switch (type) {
    case kHeaders:
      if (const char* const wrong = CountCall(FrameHeads::Stream(head), now)) return wrong;
      return CountHeaders(type, flags, length);
    case kContinuation:
      return CountHeaders(type, flags, length);
    case kReset:
      return CountReset(FrameHeads::Stream(head), now);
    case kSettings:
      acknowledged_ |= (flags & kAck) != 0;
      return CountIdle(now);
    case kWindowUpdate:
      return CountUpdate(now);
    case kData:
      return CountData(head, now);
    default:
      return CountIdle(now);
  }
}

const char* Http2Frames::CountHeaders(uint8_t type, uint8_t flags, int32_t length) {
  if (type == kHeaders) header_bytes_ = header_frames_ = 0;
  header_bytes_ += length;
  ++header_frames_;
  if (header_bytes_ > kHeaderBytesMax) return "headers above 32 KiB";
  if (header_frames_ > kHeaderFramesMax) return "headers in more than 16 frames";
  if ((flags & kEndHeaders) != 0) header_bytes_ = header_frames_ = 0;
  if (!headers_) return nullptr;
  if (const char* const wrong = headers_->Begin(type == kContinuation, flags, length)) return wrong;
  BoundStream();
  return nullptr;
}

const char* Http2Frames::CountCall(int32_t stream, TimePoint now) {
  // gRPC's clients send no trailers. Streams of even numbers are the server's: gRPC ignores them.
  if (stream <= last_stream_ || stream % 2 == 0) return CountIdle(now);
  last_stream_ = stream;
  if (!acknowledged_ && ++streams_ > limits_.streams) {
    return "streams before the settings were acknowledged";
  }
  ++begun_;
  if (const char* const wrong = Open(stream)) return wrong;
  return limits_.heap == nullptr ? nullptr : CountUnanswered(now);
}

const char* Http2Frames::CountUnanswered(TimePoint now) {
  const int64_t allowed = limits_.heap->CallsAllowed(now, limits_.streams);
  const bool high = allowed != HeapPressure::kUnbounded;
  const int64_t answers =
      answers_.load(std::memory_order_relaxed) + refusals_.load(std::memory_order_relaxed);
  if (!high || now - calls_since_ >= std::chrono::seconds(1)) {
    calls_ = 0;
    answers_before_ = answers;
    calls_since_ = now;
  }
  if (!high) return nullptr;
  const bool ends = ++calls_ - (answers - answers_before_) > allowed;
  return ends ? "calls without answers while memory is short" : nullptr;
}

const char* Http2Frames::CountReset(int32_t stream, TimePoint now) {
  return Close(stream) || resets_.Count(now) ? nullptr : "resets of streams that are not open";
}

const char* Http2Frames::CountUpdate(TimePoint now) {
  // One or several for each call, and for each piece of an answer that was read.
  const int64_t granted = kUpdatesPerFrame * (begun_ + answers_.load(std::memory_order_relaxed)) +
                          answer_bytes_.load(std::memory_order_relaxed) / kBytesPerUpdate;
  if (updates_ >= granted) {
    return CountIdle(now);
  }
  ++updates_;
  return nullptr;
}

const char* Http2Frames::CountData(const uint8_t* head, TimePoint now) {
  const int32_t length = FrameHeads::Length(head);
  const uint8_t flags = head[4];
  if (limits_.use != nullptr) {
    limits_.use->data_bytes.fetch_add(length, std::memory_order_relaxed);
  }
  if (length >= kDataBytesMin) return nullptr;
  if ((flags & kEndStream) == 0 || ends_ >= begun_) return CountIdle(now);
  ++ends_;  // of a call, which has one
  return nullptr;
}

const char* Http2Frames::CountIdle(TimePoint now) {
  return idle_.Count(now) ? nullptr : "frames with next to nothing in them";
}

}  // namespace attend

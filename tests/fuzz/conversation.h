// SPDX-License-Identifier: Apache-2.0
//
// An input of connections_fuzz as a conversation, and what messages it has.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "server/net/http2_frames.h"

namespace attend::fuzz {

inline constexpr size_t kPrefaceBytes = 24;
inline constexpr size_t kHeadBytes = FrameHeads::kBytes;
// Enough for more frames with nothing in them than there may be.
inline constexpr size_t kConversationBytesMax = size_t{512} << 10;

inline const uint8_t* Bytes(std::string_view view) {
  return reinterpret_cast<const uint8_t*>(view.data());
}

// What the client sent and what the server sent, and in which order their frames' heads ended:
// nothing else may matter, as the two sides' bytes come at once.
struct Conversation {
  struct Head {
    int side = 0;
    size_t end = 0;    // of its side's bytes
    size_t ahead = 0;  // so many may come before the side's next head ends
  };
  static constexpr int kClient = 0, kServer = 1;
  std::array<std::string, 2> bytes;
  std::vector<Head> heads;

  const uint8_t* At(const Head& head) const {
    return Bytes(bytes[static_cast<size_t>(head.side)]) + head.end - kHeadBytes;
  }
};

inline void AddFrame(std::string_view frame, int side, Conversation& to) {
  std::string& bytes = to.bytes[static_cast<size_t>(side)];
  to.heads.push_back({side, bytes.size() + kHeadBytes, 0});
  bytes += frame;
}

inline Conversation Read(std::string_view input, bool with_server) {
  Conversation read;
  read.bytes[Conversation::kClient] = input.substr(0, kPrefaceBytes);
  input.remove_prefix(std::min(kPrefaceBytes, input.size()));
  size_t left = kConversationBytesMax;
  while (input.size() >= kHeadBytes) {
    const uint8_t* const head = Bytes(input);
    const size_t whole = kHeadBytes + static_cast<size_t>(FrameHeads::Length(head));
    const std::string_view frame = input.substr(0, whole);
    input.remove_prefix(frame.size());
    const bool servers = with_server && (head[5] & 0x80) != 0;
    const bool many = with_server && frame.size() == whole && whole > kHeadBytes;
    size_t times = many ? size_t{1} << (head[kHeadBytes] >> 4) : 1;
    times = std::max<size_t>(1, std::min(times, left / frame.size()));
    left -= std::min(left, times * frame.size());
    for (; times > 0; --times) {
      AddFrame(frame, servers ? Conversation::kServer : Conversation::kClient, read);
    }
  }
  read.bytes[Conversation::kClient] += input;
  std::array<size_t, 2> ahead = {read.bytes[0].size(), read.bytes[1].size()};
  for (auto head = read.heads.rbegin(); head != read.heads.rend(); ++head) {
    head->ahead = ahead[static_cast<size_t>(head->side)];
    ahead[static_cast<size_t>(head->side)] = head->end - 1;
  }
  return read;
}

// The calls of a conversation, by all that came on them.
class Messages {
 public:
  void Count(int side, const uint8_t* head, std::string_view payload) {
    const int32_t stream = FrameHeads::Stream(head);
    const int type = head[3];
    const bool ends = type == kReset || (type <= kHeaders && (head[4] & 1) != 0);
    if (side == Conversation::kServer) {
      if (ends) open_.erase(stream);
      for (; type == kWindowUpdate && payload.size() >= 4; payload.remove_prefix(4)) {
        const int64_t bytes = Number(payload.substr(0, 4)) & 0x7fffffff;
        if (stream == 0) window_ += bytes;
        if (open_.contains(stream)) open_[stream].granted += bytes;
      }
      for (; type == kSettings && payload.size() >= 6; payload.remove_prefix(6)) {
        if (Number(payload.substr(0, 2)) == 4) {
          first_window_ = Number(payload.substr(2, 4)) & 0x7fffffff;
        }
      }
    } else if (type == kHeaders && stream > last_stream_ && stream % 2 == 1) {
      open_[last_stream_ = stream];
    } else if (type == kReset) {
      open_.erase(stream);
    } else if (type == kData) {
      window_ -= std::ssize(payload);
      if (open_.contains(stream)) Add(payload, open_[stream]);
    }
  }

  bool Stall() const {
    return std::any_of(open_.begin(), open_.end(), [&](const auto& each) {
      const Call& call = each.second;
      const int64_t needed = std::min(Left(call.came), CallMessages::kProgressBytes);
      return !call.came.empty() && std::min(first_window_ + call.granted, window_) >= needed;
    });
  }

 private:
  static constexpr int kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kWindowUpdate = 8;
  struct Call {
    std::string came;  // of the message that is under way
    int64_t granted = 0;
  };

  static int64_t Number(std::string_view bytes) {
    int64_t number = 0;
    for (const char byte : bytes) number = number << 8 | static_cast<uint8_t>(byte);
    return number;
  }
  static int64_t Left(std::string_view came) {
    return came.size() < 5 ? 1 : 5 + Number(came.substr(1, 4)) - std::ssize(came);
  }
  static void Add(std::string_view payload, Call& call) {
    call.granted -= std::ssize(payload);
    call.came += payload;
    size_t whole = 0;
    const auto left = [&] { return Left(std::string_view(call.came).substr(whole)); };
    while (left() <= 0) {
      whole = call.came.size() - static_cast<size_t>(-left());
    }
    call.came.erase(0, whole);
  }

  int32_t last_stream_ = 0;
  int64_t window_ = 65535, first_window_ = 65535;
  std::map<int32_t, Call> open_;
};

}  // namespace attend::fuzz

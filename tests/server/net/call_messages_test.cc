// SPDX-License-Identifier: Apache-2.0

#include "server/net/call_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>

namespace attend {
namespace {

using std::chrono::seconds;

constexpr TimePoint kStart{};

std::string Message(uint32_t bytes, char compressed = 0) {
  std::string message(5 + bytes, 'd');
  message[0] = compressed;
  for (int i = 0; i < 4; ++i) message[1 + i] = static_cast<char>(bytes >> (24 - 8 * i));
  return message;
}

class CallMessagesTest : public ::testing::Test {
 protected:
  CallMessagesTest() {
    messages_.SetFirstWindow(int64_t{1} << 30);
    messages_.Grant(0, int64_t{1} << 30);
    messages_.Open(1);
  }
  void Add(int32_t stream, const std::string& bytes, TimePoint now = kStart) {
    const auto* const data = reinterpret_cast<const uint8_t*>(bytes.data());
    read_ += std::ssize(bytes);
    messages_.Add(stream, {data, bytes.size()}, now, read_);
  }
  bool Stalls(int after_seconds) {
    return messages_.Stall(kStart + seconds(after_seconds), seconds(10));
  }

  CallMessages messages_;
  int64_t read_ = 0;
};

TEST_F(CallMessagesTest, AnIncompleteMessageStalls) {
  EXPECT_FALSE(Stalls(100)) << "nothing has come";
  const std::string message = Message(100);
  for (size_t at = 0; at < message.size(); ++at) {
    Add(1, message.substr(at, 1));
    EXPECT_EQ(Stalls(10), at + 1 < message.size()) << at;
    EXPECT_FALSE(Stalls(9));
  }
  Add(1, Message(0) + Message(7));
  EXPECT_FALSE(Stalls(100)) << "it is idle between messages";
  Add(1, std::string(1, '\0'));
  EXPECT_TRUE(Stalls(10));
  messages_.Close(1);
  EXPECT_FALSE(Stalls(100));
}

TEST_F(CallMessagesTest, MessageEndsAreFoundInPiecesOfAnySize) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::string bytes;
  std::string whole;  // for each byte, whether a message ends with it
  for (int i = 0; i < 200; ++i) {
    const std::string message = Message(random() % 3 == 0 ? random() % 9 : random() % 20000);
    bytes += message;
    whole += std::string(message.size() - 1, '0') + '1';
  }
  for (size_t at = 0; at < bytes.size();) {
    const size_t piece = std::min<size_t>(1 + random() % 9000, bytes.size() - at);
    Add(1, bytes.substr(at, piece));
    at += piece;
    ASSERT_EQ(Stalls(10), whole[at - 1] == '0') << at;
  }
}

TEST_F(CallMessagesTest, EnoughProgressRestartsTheTimeout) {
  const std::string some(CallMessages::kProgressBytes, 'd');
  Add(1, Message(1 << 20).substr(0, 10));
  Add(1, some, kStart + seconds(9));
  EXPECT_FALSE(Stalls(18));
  Add(1, some.substr(1), kStart + seconds(18));
  EXPECT_TRUE(Stalls(19)) << "a byte too few";
  Add(1, "d", kStart + seconds(20));
  EXPECT_FALSE(Stalls(29));
  EXPECT_TRUE(Stalls(30));
  messages_.Open(3);
  Add(3, Message(1 << 30, 1).substr(0, 10), kStart + seconds(25));
  Add(1, some, kStart + seconds(26));
  EXPECT_FALSE(Stalls(34));
  EXPECT_TRUE(Stalls(35)) << "each for itself";
}

// Clients serve their streams' windows in turn: at 4 MiB/s, eight messages of 16 MiB wait for each
// other.
TEST_F(CallMessagesTest, AMessageDoesNotStallWhileItsConnectionIsBusy) {
  const std::string large = Message(16 << 20);
  constexpr int kCalls = 8, kSecondsOfEach = 4;
  for (int i = 0; i < kCalls; ++i) {
    messages_.Open(3 + 2 * i);
    Add(3 + 2 * i, large.substr(0, 1 << 10));
  }
  int now = 0;
  for (int i = 0; i < kCalls; ++i) {
    for (int n = 0; n < kSecondsOfEach; ++n) {
      Add(3 + 2 * i, large.substr((1 << 10) + (n << 22), 4 << 20), kStart + seconds(++now));
      ASSERT_FALSE(Stalls(now)) << "call " << i;
    }
  }
  EXPECT_FALSE(Stalls(1000)) << "all are whole";
}

TEST_F(CallMessagesTest, ABusyConnectionMakesProgressForEveryMessage) {
  constexpr int kCalls = 8;
  for (int i = 0; i < kCalls; ++i) {
    messages_.Open(3 + 2 * i);
    Add(3 + 2 * i, Message(16 << 20).substr(0, 10));
  }
  const auto bring = [this](int64_t bytes, int at) {
    Add(99, std::string(static_cast<size_t>(bytes), 'd'), kStart + seconds(at));  // of any call
  };
  constexpr int64_t kEnough = kCalls * CallMessages::kProgressBytes;
  bring(kEnough, 0);
  bring(kEnough, 9);
  EXPECT_FALSE(Stalls(18));
  bring(kEnough - 1, 18);
  EXPECT_TRUE(Stalls(19)) << "a byte too few";
  bring(1, 19);
  EXPECT_FALSE(Stalls(28));
  EXPECT_TRUE(Stalls(29));
  messages_.Close(3);
  bring(kEnough - CallMessages::kProgressBytes, 30);
  EXPECT_FALSE(Stalls(39)) << "there is one message less";
  for (int i = 1; i < kCalls; ++i) Add(3 + 2 * i, Message(16 << 20).substr(10), kStart);
  EXPECT_FALSE(Stalls(1000)) << "all are whole";
  Add(1, "d", kStart + seconds(50));
  bring(CallMessages::kProgressBytes, 59);
  EXPECT_FALSE(Stalls(68)) << "one is left";
  EXPECT_TRUE(Stalls(69));
}

// When the server's windows are full, the client is not at fault.
TEST_F(CallMessagesTest, AClientWithoutWindowDoesNotStall) {
  const auto begin = [this](int32_t stream) {
    messages_.Open(stream);
    Add(stream, Message(1 << 20).substr(0, 5000));
  };
  messages_.SetFirstWindow(5000);
  begin(3);
  EXPECT_FALSE(Stalls(100));
  messages_.Grant(3, CallMessages::kProgressBytes - 1);
  EXPECT_FALSE(Stalls(200)) << "not enough";
  messages_.Grant(3, 1);
  EXPECT_FALSE(Stalls(209)) << "its time begins where it last could not";
  EXPECT_TRUE(Stalls(210));
  messages_.SetFirstWindow(4999);
  EXPECT_FALSE(Stalls(300));
  messages_.Close(3);

  messages_.SetFirstWindow(1 << 30);
  begin(5);
  messages_.Grant(0, 10'000 + CallMessages::kProgressBytes + 999 - 65535 - (int64_t{1} << 30));
  EXPECT_TRUE(Stalls(400));
  Add(99, std::string(1000, 'd'));  // of a call that has ended
  EXPECT_FALSE(Stalls(400)) << "the connection has its window too";
  messages_.Grant(0, 1000);
  EXPECT_TRUE(Stalls(410));
}

TEST_F(CallMessagesTest, TheLastPieceMayBeSmallerThanTheProgressBound) {
  messages_.SetFirstWindow(1000);
  messages_.Open(3);
  Add(3, Message(1095).substr(0, 1000));
  EXPECT_FALSE(Stalls(100));
  messages_.Grant(3, 100);
  EXPECT_TRUE(Stalls(110)) << "the message could be whole";
}

TEST_F(CallMessagesTest, LengthsHave32Bits) {
  Add(1, std::string("\xff\xff\xff\xff\xff", 5));
  EXPECT_TRUE(Stalls(100)) << "4 GiB less a byte are missing";
}

TEST_F(CallMessagesTest, IncompleteMessagesAreHeld) {
  constexpr int64_t kBuffer = CallMessages::kBufferBytes;
  const std::string large = Message(1 << 20);
  Add(1, Message(100) + Message(0));
  EXPECT_EQ(messages_.Held(), 0);
  Add(1, large.substr(0, 1000));
  EXPECT_EQ(messages_.Held(), 1000 + kBuffer);
  Add(1, large.substr(1000, 500'000));
  EXPECT_EQ(messages_.Held(), 501'000 + kBuffer);
  messages_.Open(3);
  Add(3, large.substr(0, 500'000));
  EXPECT_EQ(messages_.Held(), 1'001'000 + kBuffer) << "no more than has come";
  messages_.Close(1);
  EXPECT_EQ(messages_.Held(), 500'000 + kBuffer);
  Add(3, large.substr(500'000));
  EXPECT_EQ(messages_.Held(), 0);
}

// A few scattered bytes keep whole buffers alive.
TEST_F(CallMessagesTest, BuffersWithPiecesOfAMessageAreHeldWhole) {
  constexpr int64_t kBuffer = CallMessages::kBufferBytes;
  const std::string large = Message(1 << 20);
  Add(1, large.substr(0, 100));
  for (int64_t i = 1; i <= 10; ++i) {
    read_ += 10 * kBuffer;  // of other calls
    Add(1, large.substr(100, 100));
    EXPECT_EQ(messages_.Held(), 100 * (i + 1) + kBuffer * (i + 1));
  }
  read_ += 100 * kBuffer;
  messages_.Open(3);
  Add(3, Message(5));
  EXPECT_EQ(messages_.Held(), 1100 + 11 * kBuffer) << "what comes later is not";
}

TEST(MessageMemoryTest, SignalsWhenToLook) {
  const auto memory = std::make_shared<MessageMemory>(1600);
  CallMessages messages(memory);
  const auto add = [&, bytes = std::string(99, '\0')](size_t number) {
    messages.Add(1, {reinterpret_cast<const uint8_t*>(bytes.data()), number}, kStart, 0);
    eventfd_t times = 0;
    return eventfd_read(memory->look(), &times) == 0;
  };
  EXPECT_FALSE(add(99));
  EXPECT_TRUE(add(1));
  EXPECT_FALSE(add(50));
  EXPECT_TRUE(add(99));
  EXPECT_FALSE(add(50));
}

}  // namespace
}  // namespace attend

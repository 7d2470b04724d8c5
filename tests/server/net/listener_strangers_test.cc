// SPDX-License-Identifier: Apache-2.0
//
// Which unauthenticated connections make room for others, or time out.

#include <gtest/gtest.h>

#include <chrono>
#include <deque>
#include <iterator>
#include <mutex>

#include "tests/server/support/listener_fixture.h"

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ConnectTo;
using test::ExpectClosed;

using ListenerStrangersTest = test::ListenerFixture;

TEST_F(ListenerStrangersTest, TheOldestUnauthenticatedConnectionMakesRoom) {
  ExpectStrangers(5);
  Start(3, 3);
  uses_[0].marks->called = true;  // authenticated
  std::deque<UniqueFd> clients;
  for (size_t i = 1; i <= 3; ++i) {
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(i);
  }
  clients.push_back(ConnectTo(tcp_.port, "x"));
  EXPECT_GE(Taken(4), 0) << "it does not wait until the other is closed";
  EXPECT_EQ(Ended(1), 2U);
  CloseTaken(2);
  uses_[2].marks->called = true;
  clients.push_back(ConnectTo(tcp_.port, "x"));
  Taken(5);
  EXPECT_EQ(Ended(2), 4U);
  CloseTaken(4);
  uses_[4].marks->called = true;
  const UniqueFd refused = ConnectTo(tcp_.port, "x");
  ExpectClosed(refused);  // all others are authenticated
  EXPECT_EQ(listener_->CountOpen(), 3);
}

TEST_F(ListenerStrangersTest, UnauthenticatedConnectionsTimeOut) {
  ExpectStrangers(4);
  Start(8, 8);
  std::deque<UniqueFd> clients;
  for (size_t i = 1; i <= 3; ++i) {
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(i);
  }
  uses_[0].marks->called = uses_[3].marks->called = true;
  handed_[1]->data_bytes = ConnectionTable::kStrangerBytes;  // may be a caller's long message
  EXPECT_EQ(listener_->CountOpen(), 3);                      // the thread has processed them
  clock_.Advance(seconds(61));
  clients.push_back(ConnectTo(tcp_.port, "x"));  // wakes the thread, which sleeps by the real clock
  Taken(4);
  EXPECT_EQ(Ended(1), 3U);
  EXPECT_EQ(listener_->CountOpen(), 4) << "until it is closed";
  CloseTaken(3);
  EXPECT_EQ(listener_->CountOpen(), 3);
  clock_.Advance(seconds(59));
  ExpectStrangers(1);
  clients.push_back(ConnectTo(tcp_.port, "x"));
  Taken(5);
  clock_.Advance(seconds(2));
  ExpectStrangers(1);
  clients.push_back(ConnectTo(tcp_.port, "x"));
  Taken(6);
  EXPECT_EQ(Ended(2), 2U) << "it has sent no more";
}

TEST_F(ListenerStrangersTest, AConnectionThatLosesItsCallersTimesOut) {
  ExpectStrangers(4);
  Start(8, 8);
  std::deque<UniqueFd> clients;
  for (size_t i = 1; i <= 2; ++i) {
    uses_[i - 1].marks->called = true;
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(i);
  }
  EXPECT_EQ(listener_->CountOpen(), 2);
  clock_.Advance(seconds(61));
  uses_[0].marks->called = false;
  listener_->FindStrangers();  // its time starts here
  listener_->FindStrangers();
  uses_[2].marks->called = uses_[3].marks->called = true;
  for (const int after_seconds : {0, 59}) {
    clock_.Advance(seconds(after_seconds));
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(clients.size());
    EXPECT_EQ(listener_->CountOpen(), std::ssize(clients)) << "the thread is done with it";
  }
  clock_.Advance(seconds(2));
  listener_->FindStrangers();  // also wakes the thread
  EXPECT_EQ(Ended(1), 1U);
}

// As after SIGSTOP or in a paused container: data that clients sent meanwhile has not been read
// yet.
TEST_F(ListenerStrangersTest, ASuspendedProcessEndsNoConnections) {
  ExpectStrangers(12);
  for (Use& each : uses_) each.marks->called = true;
  Start(16, 16);
  std::deque<UniqueFd> clients;
  const auto connect = [&] {
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(clients.size());
    EXPECT_EQ(listener_->CountOpen(), std::ssize(clients)) << "the thread is done with it";
  };
  const auto count_ended = [this] {
    const std::lock_guard lock(mutex_);
    return ended_.size();
  };
  uses_[1].marks->called = false;
  connect();
  connect();
  clock_.Advance(seconds(600));
  connect();
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(count_ended(), 0U);
    clock_.Advance(seconds(10));
    connect();
  }
  EXPECT_EQ(Ended(1), 2U) << "the stranger has not called since";
}

}  // namespace
}  // namespace attend

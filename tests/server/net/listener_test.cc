// SPDX-License-Identifier: Apache-2.0
//
// Accepting connections, ending silent ones to make room, and system errors.

#include "server/net/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "tests/server/support/listener_fixture.h"

namespace {

// The error of the next `accept_errors` calls of accept4 that find a connection.
std::atomic<int> accept_error{0};
std::atomic<int> accept_errors{0};

// Whether this call is to fail.
bool TakeAcceptError() {
  if (accept_errors == 0) return false;
  --accept_errors;  // only the listener's thread gets here
  return true;
}

}  // namespace

// Replaces libc's accept4 for the listener.
extern "C" int accept4(int listener, sockaddr* address, socklen_t* bytes, int flags) {
  pollfd waiting = {listener, POLLIN, 0};
  if (poll(&waiting, 1, 0) != 1 || !TakeAcceptError()) {
    return static_cast<int>(syscall(SYS_accept4, listener, address, bytes, flags));
  }
  errno = accept_error;
  return -1;
}

namespace attend {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::ConnectTo;
using test::ExpectClosed;

using ListenerTest = test::ListenerFixture;

TEST_F(ListenerTest, HandsOverConnectionsUnchanged) {
  Start(8, 8);
  const UniqueFd silent = ConnectTo(tcp_.port);
  EXPECT_GE(Taken(1), 0);
  const UniqueFd client = ConnectTo(tcp_.port, "hello");
  const int taken = Taken(2);
  ASSERT_GE(taken, 0);
  pollfd polled{taken, POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1);
  char text[8] = {};
  EXPECT_EQ(recv(taken, text, sizeof(text), 0), 5) << "nothing of it was read before";
  EXPECT_STREQ(text, "hello");
  EXPECT_NE(fcntl(taken, F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(taken, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(listener_->CountOpen(), 2);
}

TEST_F(ListenerTest, TheOldestSilentConnectionMakesRoom) {
  Start(3, 3);
  std::deque<UniqueFd> clients;
  const auto connect = [&](bool silent) {
    silent_ = silent;
    clients.push_back(ConnectTo(tcp_.port, "x"));
    EXPECT_GE(Taken(clients.size()), 0);
  };
  connect(true);
  connect(true);
  connect(false);
  for (size_t n = 1; n <= 2; ++n) {
    connect(false);
    EXPECT_EQ(Ended(n), n);
    CloseTaken(n);
    ExpectClosed(clients[n - 1]);
  }
  ExpectClosed(ConnectTo(tcp_.port, "x"));  // all others have spoken
  EXPECT_EQ(listener_->CountOpen(), 3);
  EXPECT_EQ(reasons_, (std::vector{ConnectionRefusal::kSilent, ConnectionRefusal::kSilent}));
}

// All clients are of one peer. The transport closes none of their connections for a while.
TEST_F(ListenerTest, AFloodWaitsUntilItsConnectionsAreClosed) {
  constexpr size_t kMost = 4, kEnding = ConnectionTable::kEndingMax;
  Start(kMost, 2);
  silent_ = true;
  std::deque<UniqueFd> clients;
  for (size_t n = 1; n <= kMost + kEnding + 1; ++n) clients.push_back(ConnectTo(tcp_.port, "x"));
  EXPECT_GE(Taken(kMost + kEnding), 0);
  const UniqueFd caller = ConnectTo(tcp_.port, "x");
  {
    std::unique_lock lock(mutex_);
    EXPECT_FALSE(
        changed_.wait_for(lock, milliseconds(50), [&] { return taken_.size() > kMost + kEnding; }));
  }
  for (size_t n = 1; n <= 2; ++n) CloseTaken(n);
  clock_.Advance(milliseconds(1));
  EXPECT_GE(Taken(kMost + kEnding + 2), 0) << "none was refused";
  EXPECT_EQ(listener_->CountOpen(), kMost + kEnding);
}

TEST_F(ListenerTest, AClosedSocketFreesItsPlace) {
  Start(8, 1);
  const UniqueFd first = ConnectTo(tcp_.port, "x");
  Taken(1);
  const UniqueFd refused = ConnectTo(tcp_.port, "x");
  ExpectClosed(refused);
  CloseTaken(1);
  clock_.Advance(seconds(1));  // it does not scan for each new connection
  const UniqueFd second = ConnectTo(tcp_.port, "x");
  EXPECT_GE(Taken(2), 0);
  EXPECT_EQ(listener_->CountOpen(), 1);
}

// Without scanning all sockets.
TEST_F(ListenerTest, ARefusedConnectionFreesItsPlaceAtOnce) {
  refusing_ = true;
  Start(8, 1);
  for (size_t n = 1; n <= 3; ++n) {
    ExpectClosed(ConnectTo(tcp_.port, "x"));
    EXPECT_EQ(Taken(n), -1);
  }
}

TEST_F(ListenerTest, AnErrorOfOneConnectionDoesNotStopTheListener) {
  Start(8, 8);
  size_t taken = 0;
  for (const int error : {ECONNABORTED, EOPNOTSUPP, EPERM}) {
    accept_error = error;
    accept_errors = 1;
    const UniqueFd client = ConnectTo(tcp_.port, "x");
    Taken(++taken);
    EXPECT_EQ(accept_errors, 0) << "it was met";
    EXPECT_TRUE(CountsAcceptErrors(0)) << std::strerror(error);
  }
}

// If a firewall rejects every connection, the thread would otherwise do nothing else.
TEST_F(ListenerTest, RestsAfterManyConnectionErrors) {
  Start(8, 8);
  accept_error = EPERM;
  accept_errors = 63;
  const UniqueFd first = ConnectTo(tcp_.port, "x");
  EXPECT_GE(Taken(1), 0);
  EXPECT_TRUE(CountsAcceptErrors(0));
  accept_errors = 64;  // in one turn
  const UniqueFd second = ConnectTo(tcp_.port, "x");
  const auto until = std::chrono::steady_clock::now() + seconds(30);
  while (!CountsAcceptErrors(1)) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
    std::this_thread::yield();
  }
  EXPECT_EQ(accept_errors, 0);
  {
    std::unique_lock lock(mutex_);
    EXPECT_FALSE(changed_.wait_for(lock, milliseconds(150), [&] { return taken_.size() > 1; }))
        << "its own clock stands still, so it rests";
  }
  clock_.Advance(milliseconds(100));
  EXPECT_GE(Taken(2), 0);
  EXPECT_TRUE(CountsAcceptErrors(1));
  EXPECT_TRUE(listener_->accepting());
}

// gRPC 1.51's own listener never accepts again after this.
TEST_F(ListenerTest, ResumesWhenDescriptorsAreAvailableAgain) {
  Start(64, 64);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd waiting(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd later(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(tcp_.port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(waiting.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  WaitForAccepting(false);
  EXPECT_FALSE(listener_->accepting());
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  WaitForAccepting(true);
  EXPECT_TRUE(listener_->accepting());
  EXPECT_EQ(connect(later.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  EXPECT_EQ(send(later.get(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_GE(Taken(1), 0);
}

// One descriptor is kept in reserve, so that clients see a close instead of waiting.
TEST_F(ListenerTest, AConnectionThatCannotBeAcceptedIsClosed) {
  Start(64, 64);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // All descriptors but one are in use, below a limit that leaves room for the spare one.
  const UniqueFd waiting(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(waiting.get()) + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  std::vector<UniqueFd> filling;
  for (int fd; (fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) filling.emplace_back(fd);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(tcp_.port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(waiting.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  ExpectClosed(waiting);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace attend

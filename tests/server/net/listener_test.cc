// SPDX-License-Identifier: Apache-2.0
//
// What is accepted, what makes room for others, and what errors of the system do.

#include "server/net/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <spdlog/sinks/null_sink.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "server/net/tcp_listener.h"
#include "tests/kernels/support/manual_clock.h"

namespace {

// Of the next so many accept4 that find a connection.
std::atomic<int> accept_error{0};
std::atomic<int> accept_errors{0};

// Whether this one is to fail.
bool TakeAcceptError() {
  if (accept_errors == 0) return false;
  --accept_errors;  // on the listener's thread alone
  return true;
}

}  // namespace

// The listener's, in libc's place.
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

UniqueFd ConnectTo(int port, const char* text = "") {
  UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  send(client.get(), text, std::strlen(text), MSG_NOSIGNAL);  // it may have been closed by now
  return client;
}

// Waits for the server's end; nothing is ever sent to these clients.
void ExpectClosed(const UniqueFd& client) {
  pollfd polled{client.get(), POLLIN, 0};
  ASSERT_EQ(poll(&polled, 1, 30'000), 1) << "still open";
  char byte;
  EXPECT_LE(recv(client.get(), &byte, 1, MSG_DONTWAIT), 0);
}

class ListenerTest : public ::testing::Test {
 protected:
  void Start(int64_t connections, int64_t per_peer) {
    Result<TcpListeners> tcp = ListenTcp("127.0.0.1:0");
    ASSERT_TRUE(tcp.ok()) << tcp.status().message();
    tcp_ = std::move(*tcp);
    Listener::Callbacks callbacks;
    callbacks.take = [this](int socket) {
      const std::lock_guard lock(mutex_);
      taken_.emplace_back(socket);
      changed_.notify_all();
      return uses_.empty() ? nullptr : uses_[taken_.size() - 1].use;
    };
    callbacks.end = [this](int socket, ino_t, ClientRefusal) {
      shutdown(socket, SHUT_RDWR);
      const std::lock_guard lock(mutex_);
      ended_.push_back(socket);
      changed_.notify_all();
    };
    callbacks.changed = [this](bool accepting) {
      const std::lock_guard lock(mutex_);
      accepting_.push_back(accepting);
      changed_.notify_all();
    };
    Result<std::unique_ptr<Listener>> listener =
        Listener::Start({{connections, per_peer}, seconds(20), seconds(60)},
                        {tcp_.sockets[0].get()}, callbacks, metrics_, logger_, clock_);
    ASSERT_TRUE(listener.ok()) << listener.status().message();
    listener_ = std::move(*listener);
  }
  // Waits for the n-th connection to be handed over.
  int Taken(size_t n) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, seconds(30), [&] { return taken_.size() >= n; }));
    return taken_.size() < n ? -1 : taken_[n - 1].get();
  }
  // The next connections are strangers'.
  void ExpectStrangers(int number) {
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < number; ++i) uses_.emplace_back();
  }
  // Waits for the n-th connection that is ended, and returns the number of it as it was taken.
  size_t Ended(size_t n) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, seconds(30), [&] { return ended_.size() >= n; }));
    if (ended_.size() < n) return 0;
    const auto taken = std::find_if(taken_.begin(), taken_.end(),
                                    [&](const UniqueFd& fd) { return fd.get() == ended_[n - 1]; });
    return static_cast<size_t>(taken - taken_.begin()) + 1;
  }
  bool CountsAcceptErrors(int errors) const {
    const std::string text = prometheus::TextSerializer().Serialize(metrics_.registry()->Collect());
    const std::string sample = "\nattend_accept_errors_total " + std::to_string(errors) + "\n";
    return text.find(sample) != std::string::npos;
  }
  void CloseTaken(size_t n) {
    const std::lock_guard lock(mutex_);
    taken_[n - 1].Reset();
  }
  // Lets time pass until the listener says so.
  void WaitForAccepting(bool accepting) {
    const auto until = std::chrono::steady_clock::now() + seconds(30);
    std::unique_lock lock(mutex_);
    while (accepting_.empty() || accepting_.back() != accepting) {
      ASSERT_LT(std::chrono::steady_clock::now(), until);
      clock_.Advance(milliseconds(100));  // which it rests for
      changed_.wait_for(lock, milliseconds(10));
    }
  }

  struct Use {
    std::shared_ptr<ConnectionMarks> marks = std::make_shared<ConnectionMarks>();
    std::shared_ptr<ConnectionUse> use = std::make_shared<ConnectionUse>();
    Use() { use->marks = marks; }
  };

  Logger logger_{{}, std::make_shared<spdlog::sinks::null_sink_mt>()};
  Metrics metrics_{"test"};
  test::ManualClock clock_;
  TcpListeners tcp_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UniqueFd> taken_;
  std::vector<int> ended_;
  std::vector<Use> uses_;  // by the order in which they are taken
  std::vector<bool> accepting_;
  std::unique_ptr<Listener> listener_;
};

TEST_F(ListenerTest, HandsOverWhatSpeaksAsItIs) {
  Start(8, 8);
  const UniqueFd silent = ConnectTo(tcp_.port);
  const UniqueFd client = ConnectTo(tcp_.port, "hello");
  const int taken = Taken(1);
  ASSERT_GE(taken, 0);
  char text[8] = {};
  EXPECT_EQ(recv(taken, text, sizeof(text), 0), 5) << "nothing of it was read before";
  EXPECT_STREQ(text, "hello");
  EXPECT_NE(fcntl(taken, F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(taken, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(listener_->CountOpen(), 2);
  send(silent.get(), "x", 1, MSG_NOSIGNAL);
  EXPECT_GE(Taken(2), 0);
}

TEST_F(ListenerTest, WhoeverIsSilentForLongestMakesRoom) {
  Start(3, 3);
  const UniqueFd first = ConnectTo(tcp_.port);
  const UniqueFd second = ConnectTo(tcp_.port);
  const UniqueFd third = ConnectTo(tcp_.port, "x");
  Taken(1);
  const UniqueFd fourth = ConnectTo(tcp_.port, "x");
  Taken(2);
  ExpectClosed(first);
  const UniqueFd fifth = ConnectTo(tcp_.port, "x");
  Taken(3);
  ExpectClosed(second);
  const UniqueFd sixth = ConnectTo(tcp_.port, "x");
  ExpectClosed(sixth);  // all others have spoken
  EXPECT_EQ(listener_->CountOpen(), 3);
}

TEST_F(ListenerTest, APlaceIsFreeOnceItsSocketIsClosed) {
  Start(8, 1);
  const UniqueFd first = ConnectTo(tcp_.port, "x");
  Taken(1);
  const UniqueFd refused = ConnectTo(tcp_.port, "x");
  ExpectClosed(refused);
  CloseTaken(1);
  clock_.Advance(seconds(1));  // it does not look at each connection that comes
  const UniqueFd second = ConnectTo(tcp_.port, "x");
  EXPECT_GE(Taken(2), 0);
  EXPECT_EQ(listener_->CountOpen(), 1);
}

TEST_F(ListenerTest, SilentOnesEndInTime) {
  Start(8, 8);
  const UniqueFd gone = ConnectTo(tcp_.port);
  const UniqueFd silent = ConnectTo(tcp_.port);
  const UniqueFd speaking = ConnectTo(tcp_.port, "x");
  Taken(1);
  while (listener_->CountOpen() < 3) std::this_thread::yield();
  clock_.Advance(seconds(21));
  const UniqueFd next = ConnectTo(tcp_.port, "x");  // the thread waits by the true time
  Taken(2);
  ExpectClosed(gone);
  ExpectClosed(silent);
  EXPECT_EQ(listener_->CountOpen(), 2);
}

TEST_F(ListenerTest, TheOldestStrangerMakesRoom) {
  ExpectStrangers(5);
  Start(3, 3);
  uses_[0].marks->called = true;  // no stranger's
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
  ExpectClosed(refused);  // all others are callers'
  EXPECT_EQ(listener_->CountOpen(), 3);
}

TEST_F(ListenerTest, StrangersEndInTime) {
  ExpectStrangers(4);
  Start(8, 8);
  std::deque<UniqueFd> clients;
  for (size_t i = 1; i <= 3; ++i) {
    clients.push_back(ConnectTo(tcp_.port, "x"));
    Taken(i);
  }
  uses_[0].marks->called = uses_[3].marks->called = true;
  uses_[1].use->data_bytes = ConnectionTable::kStrangerBytes;  // perhaps a caller's long message
  EXPECT_EQ(listener_->CountOpen(), 3);                        // the thread is done with them
  clock_.Advance(seconds(61));
  clients.push_back(ConnectTo(tcp_.port, "x"));  // the thread waits by the true time
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

TEST_F(ListenerTest, AConnectionWithoutCallersIsAStrangersAgain) {
  ExpectStrangers(3);
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
  listener_->FindStrangers();  // its time begins here
  listener_->FindStrangers();
  clock_.Advance(seconds(59));
  uses_[2].marks->called = true;
  clients.push_back(ConnectTo(tcp_.port, "x"));
  Taken(3);
  EXPECT_EQ(listener_->CountOpen(), 3);
  clock_.Advance(seconds(2));
  listener_->FindStrangers();  // and wakes the thread
  EXPECT_EQ(Ended(1), 1U);
}

TEST_F(ListenerTest, AnErrorOfOneConnectionIsNone) {
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

// Where a firewall forbids all that come, the thread would do nothing else.
TEST_F(ListenerTest, RestsAfterManyErrorsOfOneConnectionEach) {
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
TEST_F(ListenerTest, SurvivesTheLackOfDescriptors) {
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

// One descriptor is kept so that clients are told, not left waiting.
TEST_F(ListenerTest, WhoCannotBeAcceptedIsClosed) {
  Start(64, 64);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // All descriptors but one are taken below a limit that leaves room for the spare one.
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

// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for gRPC, whose own listener stops using its sockets for good at the first
// error. One thread serves all addresses. A connection is kept here until its first byte arrives.
// Connections are limited in total and per peer; at a limit, the one that has been silent for
// longest is closed to make room, or else the oldest stranger's. One on which a message stalls is
// ended, and the one whose unfinished messages take most, if all together take too much. After a
// system error the listener pauses and tries again.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/mutex.h"
#include "kernels/util/status.h"
#include "server/log/logging.h"
#include "server/metrics/metrics.h"
#include "server/metrics/tls_metrics.h"
#include "server/net/connection_limits.h"
#include "server/net/connection_table.h"
#include "server/net/message_memory.h"
#include "server/util/unique_fd.h"

namespace attend {

class Listener {
 public:
  struct Options {
    ConnectionLimits limits;
    Duration first_byte_timeout;
    // In which a stranger's connection must become a caller's.
    Duration first_call_timeout = std::chrono::hours(24);
    // After which a connection is ended on which a message has stalled, at most a quarter later;
    // see CallMessages.
    Duration message_timeout = std::chrono::hours(24);
    // What unfinished messages may take. Null: anything.
    std::shared_ptr<const MessageMemory> message_memory = nullptr;
  };
  struct Callbacks {
    // Whether the client of a connection that was just accepted may connect. Null: any may. Called
    // on the thread.
    std::function<bool(int socket)> admits;
    // Takes over a connected, non-blocking socket that has something to read. Called on the thread.
    // Returns what the connection is used for; null if it is closed.
    std::function<std::shared_ptr<const ConnectionUse>(int socket)> take;
    // Ends a connection that was taken over, if it is still open. Called on the thread.
    std::function<void(int socket, ino_t inode, ClientRefusal reason)> end;
    // Accepting has failed for a while, or works again. Called on the thread, which holds no lock.
    std::function<void(bool accepting)> changed;
  };

  // Starts to accept from `sockets`, which already listen and must outlive the listener.
  static Result<std::unique_ptr<Listener>> Start(const Options& options, std::vector<int> sockets,
                                                 Callbacks callbacks, Metrics& metrics,
                                                 Logger& logger, const Clock& clock);
  ~Listener();  // closes connections that are still silent
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Connections that are open now. Any thread.
  int64_t CountOpen();
  // Connections on which nobody calls any more are strangers' from now on. Any thread.
  void FindStrangers();
  bool accepting() const { return accepting_.load(std::memory_order_acquire); }

 private:
  Listener(const Options& options, std::vector<int> sockets, Callbacks callbacks, Metrics& metrics,
           Logger& logger, const Clock& clock);
  void Run();
  void Serve(const std::vector<int>& ready) ATTEND_REQUIRES(mutex_);
  int WaitMs() ATTEND_REQUIRES(mutex_);
  bool IsListener(int fd) const;
  bool Watch(int operation, int fd, bool readable);
  void Accept(int listener) ATTEND_REQUIRES(mutex_);
  void AcceptFailed(int listener);
  // Accepts and closes a connection with the spare descriptor, so that its client is told.
  void Shed(int listener);
  void Rest(bool rest);
  void SetAccepting(bool accepting);

  void Admit(UniqueFd socket) ATTEND_REQUIRES(mutex_);
  bool MakeRoom(int socket, const std::string& peer) ATTEND_REQUIRES(mutex_);
  // False if there is none, or it would not help.
  bool EndStrangerFor(ConnectionTable::Room room, const std::string& peer) ATTEND_REQUIRES(mutex_);
  void SweepOften() ATTEND_REQUIRES(mutex_);
  // Hands the connection over if it has sent something, closes it if it has ended. True if it is
  // still open and silent.
  bool IsSilent(int fd) ATTEND_REQUIRES(mutex_);
  void Close(int fd) ATTEND_REQUIRES(mutex_);
  // Gives connections their time anew if the process stood still (stopped, frozen, or its machine).
  void ForgetStandstill() ATTEND_REQUIRES(mutex_);
  void EndSilent() ATTEND_REQUIRES(mutex_);
  void EndStrangers() ATTEND_REQUIRES(mutex_);
  void EndStalled() ATTEND_REQUIRES(mutex_);
  void EndLargest() ATTEND_REQUIRES(mutex_);
  void End(int fd, ino_t inode, ClientRefusal reason) ATTEND_REQUIRES(mutex_);
  void CountRefused(int socket, ConnectionRefusal reason);

  const Options options_;
  const std::vector<int> sockets_;
  const Callbacks callbacks_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  UniqueFd events_;                  // epoll
  UniqueFd wake_;                    // readable when the thread must look up
  std::atomic<bool> ending_{false};  // and end
  UniqueFd spare_;
  Mutex mutex_;
  ConnectionTable table_ ATTEND_GUARDED_BY(mutex_);
  TimePoint swept_{};       // the thread's, as what follows
  TimePoint looked_{};      // for messages that have stalled
  TimePoint due_ = kNever;  // when it must look up at the latest
  bool look_ = false;       // whether messages take too much
  bool resting_ = false;    // the listeners are not looked at
  TimePoint rest_until_{};
  std::optional<TimePoint> failing_since_;
  std::atomic<bool> accepting_{true};
  std::thread thread_;
};

}  // namespace attend

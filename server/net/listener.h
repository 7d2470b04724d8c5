// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for the transport. One thread serves all addresses. A connection is kept here
// until its first byte arrives.
//
// Connections are limited in total and per peer. At a limit, the longest silent one is closed to
// make room, or else the oldest stranger. A connection on which a message stalls is ended; so is
// the one with the most memory in unfinished messages if all together hold too much. After a system
// error the listener pauses and tries again.

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
    // A stranger must have a call accepted within this time.
    Duration first_call_timeout = std::chrono::hours(24);
    // A connection on which a message stalls for this long is ended, at most a quarter later; see
    // CallMessages.
    Duration message_timeout = std::chrono::hours(24);
    // The bound of unfinished messages. Null: unbounded.
    std::shared_ptr<const MessageMemory> message_memory = nullptr;
  };
  struct Callbacks {
    // Whether an accepted connection may proceed, by its client's address. Null: always. Called on
    // the listener's thread.
    std::function<bool(int socket)> admits;
    // Takes over a connected, non-blocking socket with bytes to read. Returns its use, or null if
    // the callback has closed it. Called on the listener's thread.
    std::function<std::shared_ptr<const ConnectionUse>(int socket)> take;
    // Ends a connection that was taken over, if it is still open. Called on the listener's thread.
    std::function<void(int socket, ino_t inode, ClientRefusal reason)> end;
    // Accepting has failed for a second, or works again. Called on the listener's thread, without a
    // lock.
    std::function<void(bool accepting)> changed;
  };

  // Starts to accept from `sockets`, which already listen and must outlive the listener.
  static Result<std::unique_ptr<Listener>> Start(const Options& options, std::vector<int> sockets,
                                                 Callbacks callbacks, Metrics& metrics,
                                                 Logger& logger, const Clock& clock);
  ~Listener();  // closes connections that are still silent
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The number of open connections. Any thread.
  int64_t CountOpen();
  // Call it when credentials change: connections without a valid one are strangers again. Any
  // thread.
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
  // Out of descriptors: accepts and closes waiting connections with the spare descriptor, so that
  // their clients see an error instead of a hang.
  void Shed(int listener);
  void Rest(bool rest);
  void SetAccepting(bool accepting);

  void Admit(UniqueFd socket) ATTEND_REQUIRES(mutex_);
  bool MakeRoom(int socket, const std::string& peer) ATTEND_REQUIRES(mutex_);
  // False if there is none, or if it would not make room.
  bool EndStrangerFor(ConnectionTable::Room room, const std::string& peer) ATTEND_REQUIRES(mutex_);
  void SweepOften() ATTEND_REQUIRES(mutex_);
  // Hands the connection over if it has sent something; closes it if the client has closed. True if
  // it is still open and silent.
  bool IsSilent(int fd) ATTEND_REQUIRES(mutex_);
  void Close(int fd) ATTEND_REQUIRES(mutex_);
  // Restarts timeouts if the process was suspended (stopped, frozen, or its machine was).
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
  UniqueFd wake_;                    // wakes the thread
  std::atomic<bool> ending_{false};  // set before wake_: the thread returns
  UniqueFd spare_;
  Mutex mutex_;
  ConnectionTable table_ ATTEND_GUARDED_BY(mutex_);
  TimePoint swept_{};       // the thread's only, as all below
  TimePoint looked_{};      // last check for stalled messages
  TimePoint due_ = kNever;  // latest time of the next wake-up
  bool look_ = false;       // message memory must be checked
  bool resting_ = false;    // the listening sockets are not polled
  TimePoint rest_until_{};
  std::optional<TimePoint> failing_since_;
  std::atomic<bool> accepting_{true};
  std::thread thread_;
};

}  // namespace attend

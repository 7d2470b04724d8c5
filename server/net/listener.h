// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections for the transport. One thread serves all addresses.
//
// Connections are limited in total and per peer. At a limit, the oldest stranger makes room; if too
// many of those are yet to be closed, clients wait unaccepted. The connection with the most memory
// in unfinished messages is ended if all together hold too much. After a system error the listener
// pauses and tries again.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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
#include "server/transport/loop.h"
#include "server/util/unique_fd.h"

namespace attend {

class Listener final : private Loop::Task, private Loop::Timer {
 public:
  struct Options {
    ConnectionLimits limits;
    // A stranger must become none within this time.
    Duration first_call_timeout = std::chrono::hours(24);
    // The bound of unfinished messages. Null: unbounded.
    std::shared_ptr<const MessageMemory> message_memory = nullptr;
  };
  struct Callbacks {
    // Whether an accepted connection may proceed, by its client's address. Null: always. Called on
    // the listener's thread.
    std::function<bool(int socket)> admits;
    // Takes over a connected, non-blocking socket. Returns its use, or null if the callback has
    // closed it. Called on the listener's thread.
    std::function<std::shared_ptr<const ConnectionUse>(int socket)> take;
    // Ends a connection that was taken over, if it is still open. Called on the listener's thread.
    std::function<void(const ConnectionUse& use, ConnectionRefusal reason)> end;
    // Accepting has failed for a second, or works again. Called on the listener's thread, without a
    // lock.
    std::function<void(bool accepting)> changed;
  };

  // Starts to accept from `sockets`, which already listen and must outlive the listener.
  static Result<std::unique_ptr<Listener>> Start(const Options& options,
                                                 const std::vector<int>& sockets,
                                                 Callbacks callbacks, Metrics& metrics,
                                                 Logger& logger, const Clock& clock);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // The number of open connections. Any thread.
  int64_t CountOpen();
  // Call it when credentials change: connections without a valid one are strangers again. Any
  // thread.
  void FindStrangers();
  bool accepting() const { return accepting_.load(std::memory_order_acquire); }

 private:
  Listener(const Options& options, const std::vector<int>& sockets, Callbacks callbacks,
           Metrics& metrics, Logger& logger, const Clock& clock);
  // A listening socket, or the eventfd of the memory of messages.
  class Watched final : public Loop::Watcher {
   public:
    Watched(Listener& listener, int fd) : fd(fd), listener_(listener) {}
    void OnEvents(uint32_t) override { listener_.Serve(fd); }

    const int fd;

   private:
    Listener& listener_;
  };
  void Run() override { Serve(-1); }     // Loop::Task
  void OnTime() override { Serve(-1); }  // Loop::Timer
  // The descriptor is readable; -1: it may be time for something.
  void Serve(int fd);
  void ServeLocked(int fd) ATTEND_REQUIRES(mutex_);
  void SetTimer() ATTEND_REQUIRES(mutex_);
  void Accept(int listener) ATTEND_REQUIRES(mutex_);
  void AcceptFailed(int listener);
  // Out of descriptors: accepts and closes waiting connections with the spare descriptor, so that
  // their clients see an error instead of a hang.
  void Shed(int listener);
  // Accepts nothing for this long.
  void Rest(Duration pause);
  void Watch(bool watch);
  void SetAccepting(bool accepting);

  // See ConnectionTable::MayAdd.
  bool MayAdd() ATTEND_REQUIRES(mutex_);
  void Admit(UniqueFd socket) ATTEND_REQUIRES(mutex_);
  bool MakeRoom(int socket, const std::string& peer) ATTEND_REQUIRES(mutex_);
  // False if there is none, or if it would not make room.
  bool EndStrangerFor(ConnectionTable::Room room, const std::string& peer) ATTEND_REQUIRES(mutex_);
  void SweepOften() ATTEND_REQUIRES(mutex_);
  // Restarts timeouts if the process was suspended (stopped, frozen, or its machine was).
  void ForgetStandstill() ATTEND_REQUIRES(mutex_);
  void EndStrangers() ATTEND_REQUIRES(mutex_);
  void EndLargest() ATTEND_REQUIRES(mutex_);
  void End(const ConnectionTable::Stranger& stranger) ATTEND_REQUIRES(mutex_);
  void CountRefused(int socket, ConnectionRefusal reason);

  const Options options_;
  const Callbacks callbacks_;
  Metrics& metrics_;
  Logger& logger_;
  const Clock& clock_;
  UniqueFd spare_;
  Mutex mutex_;
  ConnectionTable table_ ATTEND_GUARDED_BY(mutex_);
  TimePoint swept_{};       // the thread's only, as all below
  TimePoint due_ = kNever;  // latest time of the next wake-up
  bool resting_ = false;    // the listening sockets are not polled
  TimePoint rest_until_{};
  std::optional<TimePoint> failing_since_;
  std::atomic<bool> accepting_{true};
  bool told_ = true;             // accepting_ as last told
  std::deque<Watched> sockets_;  // a deque, so that none moves
  Watched memory_;
  std::unique_ptr<Loop> loop_;  // destroyed first: its thread uses the rest
};

}  // namespace attend

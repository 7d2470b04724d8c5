// SPDX-License-Identifier: Apache-2.0
//
// A thread that serves sockets, timers and tasks. A connection is used only on its loop's thread,
// so connections need no locks; other threads reach them by posting tasks.
//
// A turn waits for events, serves all of them, runs the tasks and timers that are due, and finally
// calls the objects registered with AtTurnEnd. So everything a turn has to send to a client leaves
// in one write.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/util/clock.h"
#include "kernels/util/status.h"
#include "kernels/util/thread_name.h"
#include "server/util/unique_fd.h"

namespace attend {

class Loop {
 public:
  // Work for the loop's thread. Posting allocates nothing: the object is its own list node.
  class Task {
   public:
    // On the loop's thread. From here on the task may be posted again.
    virtual void Run() = 0;

    // It is going to run, and must stay alive until then. On the loop's thread.
    bool posted() const { return posted_.load(); }

   protected:
    ~Task() = default;

   private:
    friend class Loop;
    Task* next_ = nullptr;
    std::atomic<bool> posted_{false};
  };

  // Receives the events of a descriptor.
  class Watcher {
   public:
    virtual void OnEvents(uint32_t events) = 0;

   protected:
    ~Watcher() = default;
  };

  // Called once, at the end of a turn in which it was registered with AtTurnEnd.
  class TurnEnd {
   public:
    virtual void OnTurnEnd() = 0;

   protected:
    ~TurnEnd() = default;

   private:
    friend class Loop;
    bool waiting_ = false;
    TurnEnd* before_ = nullptr;
    TurnEnd* after_ = nullptr;
  };

  // Must be cleared before it is destroyed.
  class Timer {
   public:
    virtual void OnTime() = 0;
    bool set() const { return place_ != kNowhere; }

   protected:
    ~Timer() = default;

   private:
    friend class Loop;
    static constexpr size_t kNowhere = static_cast<size_t>(-1);
    TimePoint due_{};
    size_t place_ = kNowhere;  // in the heap
  };

  // `after_events` is called twice in every turn: after all events, and after all tasks. `clock`
  // must outlive the loop.
  static Result<std::unique_ptr<Loop>> Start(
      ThreadName name, const Clock& clock, std::function<void()> after_events = [] {});
  // Runs the tasks posted so far, then ends the thread. No watcher or timer is called any more.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs the task once, soon. Does nothing if it is already posted and has not started. Any thread;
  // never blocks, takes no lock and allocates nothing.
  void Post(Task& task);
  // Calls `what` on the loop's thread and waits for it. Not from the loop's thread.
  void RunAndWait(const std::function<void()>& what);
  bool OnThread() const { return std::this_thread::get_id() == id_.load(); }
  // Number of turns so far. Any thread.
  int64_t turns() const { return turns_.load(std::memory_order_relaxed); }

  // Below: on the loop's thread only.
  Status Watch(int fd, uint32_t events, Watcher& watcher);
  void Rewatch(int fd, uint32_t events, Watcher& watcher);
  // The watcher may still be called in this turn for events that have already happened, so it must
  // outlive the turn: delete it in a task.
  void Unwatch(int fd);
  void AtTurnEnd(TurnEnd& what);
  void Forget(TurnEnd& what);
  // Sets or moves a timer. May throw std::bad_alloc.
  void Set(Timer& timer, TimePoint due);
  void Clear(Timer& timer);

 private:
  Loop(const Clock& clock, std::function<void()> after_events);
  void Run();
  void Wait();
  void RunTasks();
  void RunTimers();
  void EndTurn();
  // -1: no limit.
  int WaitMs() const;
  void Place(Timer* timer, size_t place);
  void Rise(size_t place);
  void Sink(size_t place);

  const Clock& clock_;
  const std::function<void()> after_events_;
  UniqueFd events_;                     // epoll
  UniqueFd wake_;                       // eventfd
  std::atomic<Task*> posted_{nullptr};  // newest first
  std::atomic<bool> asleep_{false};     // or about to be: a post must wake it
  std::atomic<bool> ending_{false};
  std::atomic<int64_t> turns_{0};
  std::vector<Timer*> timers_;         // a binary heap, earliest first
  TurnEnd* first_turn_end_ = nullptr;  // a linked list, newest first
  std::atomic<std::thread::id> id_{};  // of the thread, once it runs
  std::thread thread_;
};

}  // namespace attend

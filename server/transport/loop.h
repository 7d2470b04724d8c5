// SPDX-License-Identifier: Apache-2.0
//
// A thread that serves sockets, timers and tasks. Everything of a connection happens on the thread
// of its loop, so connections need no locks; other threads reach them by posting tasks.
//
// A turn of the loop waits for events, serves all that there are, runs the tasks and timers that
// are due, and then tells those that asked for the end of the turn: so what a turn has to say to a
// client leaves in one write.

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
  // Something to do on the loop's thread. Posting needs no memory: the object is a link of the
  // list.
  class Task {
   public:
    // On the loop's thread. The task may be posted again from here on.
    virtual void Run() = 0;

    // It will run, and until then it must stay. On the loop's thread.
    bool posted() const { return posted_.load(); }

   protected:
    ~Task() = default;

   private:
    friend class Loop;
    Task* next_ = nullptr;
    std::atomic<bool> posted_{false};
  };

  // A descriptor's events.
  class Watcher {
   public:
    virtual void OnEvents(uint32_t events) = 0;

   protected:
    ~Watcher() = default;
  };

  // Once, at the end of a turn in which AtTurnEnd was called for it.
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

  // Its owner takes it back before it goes.
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

  // `after_events` is called in every turn once all events have been served, and again once the
  // tasks have. `clock` must outlive the loop.
  static Result<std::unique_ptr<Loop>> Start(
      ThreadName name, const Clock& clock, std::function<void()> after_events = [] {});
  // Runs the tasks that were posted, and then ends the thread. No descriptor may be watched any
  // more.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs the task once, soon. A task that is posted and has not begun to run is not posted again.
  // Any thread; never blocks, takes no lock and no memory.
  void Post(Task& task);
  // Calls `what` on the loop's thread, and returns once it has returned. From another thread.
  void RunAndWait(const std::function<void()>& what);
  bool OnThread() const { return std::this_thread::get_id() == id_.load(); }
  // Turns so far. Any thread.
  int64_t turns() const { return turns_.load(std::memory_order_relaxed); }

  // The rest is for the loop's thread.
  Status Watch(int fd, uint32_t events, Watcher& watcher);
  void Rewatch(int fd, uint32_t events, Watcher& watcher);
  // It may still be called in this turn for what has already happened, so it must outlive the turn:
  // delete it by a task.
  void Unwatch(int fd);
  void AtTurnEnd(TurnEnd& what);
  void Forget(TurnEnd& what);
  // Sets or moves it. May throw std::bad_alloc.
  void Set(Timer& timer, TimePoint due);
  void Clear(Timer& timer);

 private:
  Loop(const Clock& clock, std::function<void()> after_events);
  void Run();
  void Wait();
  void RunTasks();
  void RunTimers();
  void EndTurn();
  // -1: for ever.
  int WaitMs() const;
  void Place(Timer* timer, size_t place);
  void Rise(size_t place);
  void Sink(size_t place);

  const Clock& clock_;
  const std::function<void()> after_events_;
  UniqueFd events_;                     // epoll
  UniqueFd wake_;                       // eventfd
  std::atomic<Task*> posted_{nullptr};  // newest first
  std::atomic<bool> asleep_{false};     // or about to be, so a post must wake it
  std::atomic<bool> ending_{false};
  std::atomic<int64_t> turns_{0};
  std::vector<Timer*> timers_;         // a heap, the next first
  TurnEnd* first_turn_end_ = nullptr;  // a list, the newest first
  std::atomic<std::thread::id> id_{};  // of the thread, once it runs
  std::thread thread_;
};

}  // namespace attend

// SPDX-License-Identifier: Apache-2.0
//
// Timers are in a binary heap of pointers in which each timer knows its index, so Set and Clear are
// O(log n) and allocate only for a new timer. Posted tasks are in a lock-free stack, which a turn
// takes as a whole and reverses.
//
// A wake-up cannot be lost: the loop sets asleep_ before it looks for tasks a last time, and Post
// adds its task before it looks at asleep_, both sequentially consistent. Only the post that clears
// asleep_ writes to the eventfd.

#include "server/transport/loop.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

namespace attend {
namespace {

constexpr int kEventsMax = 256;
constexpr uint64_t kSliceNs = 500'000;

// As in the kernel's headers; Debian 12's libc has no declaration.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};

// On a busy machine, a thread with short slices is scheduled sooner after it wakes up. Effective
// from Linux 6.12 on; earlier versions ignore it, and a sandbox may refuse it.
void AskForShortSlices() {
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

Loop::Loop(const Clock& clock, std::function<void()> after_events)
    : clock_(clock),
      after_events_(std::move(after_events)),
      events_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Result<std::unique_ptr<Loop>> Loop::Start(ThreadName name, const Clock& clock,
                                          std::function<void()> after_events) {
  std::unique_ptr<Loop> loop(new Loop(clock, std::move(after_events)));
  epoll_event event{};
  event.events = EPOLLIN;
  if (!loop->events_.valid() || !loop->wake_.valid() ||
      epoll_ctl(loop->events_.get(), EPOLL_CTL_ADD, loop->wake_.get(), &event) != 0) {
    return Unavailable(std::string("a loop cannot watch its sockets: ") + strerror(errno));
  }
  loop->thread_ = std::thread([self = loop.get(), name] {
    NameThread(name);
    AskForShortSlices();
    self->Run();
  });
  return loop;
}

Loop::~Loop() {
  if (!thread_.joinable()) return;
  ending_.store(true);
  eventfd_write(wake_.get(), 1);
  thread_.join();
}

void Loop::Post(Task& task) {
  if (task.posted_.exchange(true)) return;
  Task* head = posted_.load(std::memory_order_relaxed);
  do {
    task.next_ = head;
  } while (!posted_.compare_exchange_weak(head, &task));
  // Only the first post to a sleeping loop pays for the wake-up.
  if (asleep_.exchange(false)) eventfd_write(wake_.get(), 1);
}

void Loop::RunAndWait(const std::function<void()>& what) {
  class Call final : public Task {
   public:
    explicit Call(const std::function<void()>& what) : what_(what) {}
    void Run() override {
      what_();
      returned_.store(true);
      returned_.notify_all();
    }
    void Wait() const { returned_.wait(false); }

   private:
    const std::function<void()>& what_;
    std::atomic<bool> returned_{false};
  };
  Call call(what);
  Post(call);
  call.Wait();
}

void Loop::Run() {
  id_.store(std::this_thread::get_id());
  while (!ending_.load()) {
    Wait();
    after_events_();
    RunTasks();
    after_events_();
    RunTimers();
    EndTurn();
    turns_.fetch_add(1, std::memory_order_relaxed);
  }
  RunTasks();
  after_events_();
  EndTurn();
}

void Loop::Wait() {
  std::array<epoll_event, kEventsMax> events;
  int wait_ms = WaitMs();
  asleep_.store(true);
  // A task posted before asleep_ was set has not woken the loop.
  if (posted_.load() != nullptr || ending_.load()) wait_ms = 0;
  const int count = epoll_wait(events_.get(), events.data(), kEventsMax, wait_ms);
  asleep_.store(false);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr == nullptr) {
      eventfd_t value;
      eventfd_read(wake_.get(), &value);
      continue;
    }
    static_cast<Watcher*>(events[i].data.ptr)->OnEvents(events[i].events);
  }
}

void Loop::RunTasks() {
  Task* newest = posted_.exchange(nullptr);
  Task* first = nullptr;  // in posting order
  while (newest != nullptr) {
    Task* const next = newest->next_;
    newest->next_ = first;
    first = newest;
    newest = next;
  }
  while (first != nullptr) {
    Task& task = *first;
    first = task.next_;
    task.posted_.store(false);
    task.Run();
  }
}

void Loop::RunTimers() {
  if (timers_.empty()) return;
  const TimePoint now = clock_.Now();
  while (!timers_.empty() && timers_.front()->due_ <= now) {
    Timer& timer = *timers_.front();
    Clear(timer);
    timer.OnTime();
  }
}

void Loop::EndTurn() {
  while (first_turn_end_ != nullptr) {
    TurnEnd& what = *first_turn_end_;
    Forget(what);
    what.OnTurnEnd();
  }
}

int Loop::WaitMs() const {
  if (timers_.empty()) return -1;
  // Rounded up, so that the timer is due when the wait ends.
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(timers_.front()->due_ - clock_.Now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
}

Status Loop::Watch(int fd, uint32_t events, Watcher& watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watcher;
  if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return Status();
  return Unavailable("descriptor " + std::to_string(fd) + " cannot be watched: " + strerror(errno));
}

void Loop::Rewatch(int fd, uint32_t events, Watcher& watcher) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &watcher;
  epoll_ctl(events_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::Unwatch(int fd) { epoll_ctl(events_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Loop::AtTurnEnd(TurnEnd& what) {
  if (std::exchange(what.waiting_, true)) return;
  what.before_ = nullptr;
  what.after_ = std::exchange(first_turn_end_, &what);
  if (what.after_ != nullptr) what.after_->before_ = &what;
}

void Loop::Forget(TurnEnd& what) {
  if (!std::exchange(what.waiting_, false)) return;
  (what.before_ == nullptr ? first_turn_end_ : what.before_->after_) = what.after_;
  if (what.after_ != nullptr) what.after_->before_ = what.before_;
}

void Loop::Set(Timer& timer, TimePoint due) {
  if (!timer.set()) {
    timers_.push_back(&timer);
    timer.place_ = timers_.size() - 1;
  }
  timer.due_ = due;
  Rise(timer.place_);
  Sink(timer.place_);
}

void Loop::Clear(Timer& timer) {
  if (!timer.set()) return;
  const size_t place = std::exchange(timer.place_, Timer::kNowhere);
  Timer* const last = timers_.back();
  timers_.pop_back();
  if (last == &timer) return;
  Place(last, place);
  Rise(place);
  Sink(last->place_);
}

void Loop::Place(Timer* timer, size_t place) {
  timers_[place] = timer;
  timer->place_ = place;
}

void Loop::Rise(size_t place) {
  while (place > 0) {
    const size_t parent = (place - 1) / 2;
    Timer* const above = timers_[parent];
    if (above->due_ <= timers_[place]->due_) return;
    Place(timers_[place], parent);
    Place(above, place);
    place = parent;
  }
}

void Loop::Sink(size_t place) {
  for (;;) {
    size_t next = 2 * place + 1;
    if (next >= timers_.size()) return;
    if (next + 1 < timers_.size() && timers_[next + 1]->due_ < timers_[next]->due_) ++next;
    Timer* const below = timers_[next];
    if (timers_[place]->due_ <= below->due_) return;
    Place(timers_[place], next);
    Place(below, place);
    place = next;
  }
}

}  // namespace attend

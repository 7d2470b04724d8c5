// SPDX-License-Identifier: Apache-2.0
//
// Operations are linked through their own pointers, so registering one allocates nothing. A loop
// ends only when its list is empty: then no event of its operations is outstanding, and the queue
// can be shut down.

#include "client/rpc/completion_loop.h"

#include <grpcpp/alarm.h>

#include <cassert>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/util/thread_name.h"

namespace attend::client {

// A function posted to the loop's thread, as an operation with an alarm that fires at once.
class CompletionLoop::Posted final : public Operation {
 public:
  Posted(CompletionLoop* loop, std::function<void()> function)
      : loop_(loop), function_(std::move(function)) {}

  void Start(std::shared_ptr<Posted> self) {
    self_ = std::move(self);
    alarm_.Set(loop_->queue(), gpr_inf_past(GPR_CLOCK_MONOTONIC), event_.Tag());
  }
  void Run() { std::exchange(function_, nullptr)(); }
  void OnEvent(int, bool) override {
    const std::shared_ptr<Posted> self = std::move(self_);
    Run();
    loop_->Remove(this);
  }
  void Cancel() override {}  // it fires at once anyway

 private:
  CompletionLoop* const loop_;
  std::function<void()> function_;
  Event event_{this, 0};
  grpc::Alarm alarm_;
  std::shared_ptr<Posted> self_;
};

CompletionLoop::CompletionLoop(CompletionLoop* releases)
    : releases_(releases), thread_([this] { Run(); }) {}

CompletionLoop::~CompletionLoop() { Shutdown(); }

void CompletionLoop::Shutdown() {
  {
    const MutexLock lock(mutex_);
    while (first_ != nullptr) empty_.Wait(mutex_);
    if (std::exchange(shut_down_, true)) return;
    busy_.NotifyAll();
  }
  queue_.Shutdown();
  thread_.join();
}

void CompletionLoop::Run() {
  NameThread("attend-client");
  std::optional<ReleaseGate> gate;
  if (releases_ != nullptr) {
    gate.emplace([this](ReleasedMemory memory) { releases_->Release(std::move(memory)); });
  }
  void* tag = nullptr;
  bool ok = false;
  for (;;) {
    if (releases_ != nullptr) WaitForOperations();
    if (!queue_.Next(&tag, &ok)) return;
#ifdef ATTEND_THREAD_SANITIZER
    __tsan_acquire(tag);
#endif
    const auto* event = static_cast<const Event*>(tag);
    event->operation->OnEvent(event->slot, ok);
  }
}

void CompletionLoop::WaitForOperations() {
  const MutexLock lock(mutex_);
  while (first_ == nullptr && !shut_down_) busy_.Wait(mutex_);
}

bool CompletionLoop::Add(Operation* operation) {
  const MutexLock lock(mutex_);
  if (closed_) return false;
  Enter(operation);
  return true;
}

void CompletionLoop::Enter(Operation* operation) {
  assert(operation->next_ == nullptr && operation->previous_ == nullptr && operation != first_);
  operation->next_ = first_;
  if (first_ != nullptr) first_->previous_ = operation;
  if (first_ == nullptr) busy_.NotifyAll();
  first_ = operation;
}

void CompletionLoop::Post(std::function<void()> function) {
  const auto posted = std::make_shared<Posted>(this, std::move(function));
  bool here = false;
  {
    const MutexLock lock(mutex_);
    here = shut_down_;
    if (!here) Enter(posted.get());
  }
  if (here) return posted->Run();
  posted->Start(posted);
}

void CompletionLoop::Release(ReleasedMemory memory) {
  Post([kept = std::make_shared<ReleasedMemory>(std::move(memory))] {});
}

void CompletionLoop::Remove(Operation* operation) {
  const MutexLock lock(mutex_);
  assert((operation == first_) == (operation->previous_ == nullptr) && "it is not here");
  if (operation->previous_ != nullptr) operation->previous_->next_ = operation->next_;
  if (operation->next_ != nullptr) operation->next_->previous_ = operation->previous_;
  if (first_ == operation) first_ = operation->next_;
  operation->previous_ = operation->next_ = nullptr;
  if (first_ == nullptr) empty_.NotifyAll();
}

void CompletionLoop::Close() {
  std::vector<std::shared_ptr<Operation>> all;
  {
    const MutexLock lock(mutex_);
    closed_ = true;
    for (Operation* operation = first_; operation != nullptr; operation = operation->next_) {
      all.push_back(operation->shared_from_this());
    }
  }
  for (const auto& operation : all) operation->Cancel();
  all.clear();
  const MutexLock lock(mutex_);
  while (first_ != nullptr) empty_.Wait(mutex_);
}

CompletionLoops::CompletionLoops(int count) {
  for (int n = 0; n < count; ++n) loops_.push_back(std::make_unique<CompletionLoop>());
  control_ = std::make_unique<CompletionLoop>(at(0));
}

CompletionLoops::~CompletionLoops() {
  control_->Shutdown();
  for (const auto& loop : loops_) loop->Shutdown();
}

}  // namespace attend::client

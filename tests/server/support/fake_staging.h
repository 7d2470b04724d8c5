// SPDX-License-Identifier: Apache-2.0
//
// Stagings of a fake device: memory of their own, filled by one thread that does what was enqueued
// in order, as a GPU's stream does. A test can hold that thread, and let the N-th call of every
// entry point fail. A byte that is copied twice, or before it is there, fails the test, and so does
// memory of the device or the host that is still held when the device goes.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "kernels/contract/backend.h"
#include "tests/server/support/call_faults.h"

namespace attend::test {

// All controls may be called from any thread.
class FakeStream {
 public:
  FakeStream() : thread_([this] { Run(); }) {}
  ~FakeStream();  // does what was enqueued first

  Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host, std::shared_ptr<void> owner);

  // From now on what is enqueued waits.
  void Hold();
  void Release();
  // The N-th call from now (1 = the next) of these fails with `status`.
  void FailMake(int n, Status status);
  void FailCopy(int n, Status status);
  void FailFinish(int n, Status status);
  void ForgetFaults();

  struct Counts {
    int64_t makes = 0;  // calls, failed ones too
    int64_t copies = 0;
    int64_t finishes = 0;
    int64_t device_bytes = 0;  // held now
    int64_t enqueued = 0;      // and not done
  };
  Counts counts() const;

  // Whether it is of such a stream.
  static bool Knows(const DeviceEvent* event);
  // Waits for what `event`, one of this stream's, stands for.
  static Status WaitFor(const DeviceEvent* event);

 private:
  class FakeStaging;
  struct Event;

  void Enqueue(std::function<void()> work);
  void Run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool held_ = false;
  bool stop_ = false;
  bool working_ = false;
  int64_t device_bytes_ = 0;
  CallFaults makes_;
  CallFaults copies_;
  CallFaults finishes_;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace attend::test

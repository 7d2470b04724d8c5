// SPDX-License-Identifier: Apache-2.0
//
// Staging of a fake device: its own memory, filled by one thread that processes work in the order
// it was enqueued, like a GPU's stream. A test can hold that thread, and let the N-th call of every
// entry point fail. A byte that is copied twice, or before it has arrived, fails the test; so does
// device or host memory still held when the device is destroyed.

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
  ~FakeStream();  // processes work in the order it was enqueued

  Result<std::unique_ptr<Staging>> MakeStaging(const HostSpan& host, std::shared_ptr<void> owner);

  // Work enqueued after this waits.
  void Hold();
  void Release();
  // The N-th call from now (1 = the next) fails with `status`.
  void FailMake(int n, Status status);
  void FailCopy(int n, Status status);
  void FailFinish(int n, Status status);
  void ForgetFaults();

  struct Counts {
    int64_t makes = 0;  // calls, including failed ones
    int64_t copies = 0;
    int64_t finishes = 0;
    int64_t device_bytes = 0;  // held now
    int64_t enqueued = 0;      // and not done
  };
  Counts counts() const;

  // Whether the range belongs to such a stream.
  static bool Knows(const DeviceEvent* event);
  // Waits for the work that `event`, one of this stream's, stands for.
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
  std::thread thread_;  // last: its thread uses the other members
};

}  // namespace attend::test

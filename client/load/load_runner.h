// SPDX-License-Identifier: Apache-2.0
//
// Runs one measurement of `attend-client load`. Requests are sent by completion threads (closed
// loop: each answer sends the next request) or by a dispatcher thread (open loop: at the schedule's
// times, regardless of answers). The calling thread prints progress and watches for the interrupt.
//
// A request is measured if its intended send is inside the measurement, and its latency counts from
// that moment (no coordinated omission) as well as from the actual send. Requests intended for the
// measurement that could not be sent before its end are counted too. Rates are the answers that
// arrive inside the measurement, divided by its length. A measurement consists of windows
// (windows.h); with a rule, the last three that agree are reported.

#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "client/load/measurement.h"
#include "client/load/timer_thread.h"
#include "client/load/workload.h"
#include "kernels/util/mutex.h"

namespace attend::client {

class LoadRunner {
 public:
  // All must outlive the runner. `interrupted` is set by a signal handler.
  LoadRunner(const LoadOptions& options, const Workload& workload, VerifyQueue* verify,
             const std::atomic<bool>* interrupted);

  Result<LoadResult> Run(const LoadStep& step);

 private:
  // One request in flight; reused for the next one.
  struct Slot {
    Workload::Draw draw;
    SharedPlace output;  // in shared memory: where the answer goes
    int64_t intended_ns = 0;
    int64_t sent_ns = 0;
    bool measured = false;
    bool held_back = false;
  };

  Status Open(const LoadStep& step);
  Status PlaceOutputs();
  void Dispatch(const LoadStep& step);
  // Counts the requests that the open loop has not sent at its end, starting with the one at
  // `intended_ns`.
  void CountUnsent(int64_t intended_ns, int64_t start_ns, Schedule* schedule);
  void Watch();
  void WaitForAnswers(LoadResult* result);

  // Whether a request intended for this time is to be sent; if so, counts it.
  bool Admit(int64_t intended_ns, bool* measured);
  void Send(Slot* slot, int64_t intended_ns);
  std::shared_ptr<const EncodedCall> CallOf(const Slot& slot) const;
  void OnAnswer(Slot* slot, CallOutcome outcome);
  void Record(const Slot& slot, const CallOutcome& outcome, int64_t now_ns);
  bool Expected(const Slot& slot, Code code) const;
  // Sends the next request of a closed loop, after `rest`.
  void Continue(Slot* slot, std::chrono::milliseconds rest);
  void Retire(Slot* slot);
  Slot* TakeSlot(bool* waited);
  void Progress(int64_t now_ns, int64_t since_ns);

  const LoadOptions& options_;
  const Workload& workload_;
  VerifyQueue* const verify_;
  const std::atomic<bool>* const interrupted_;

  bool open_loop_ = false;
  std::optional<Measurement> measurement_;
  std::vector<Slot> slots_;
  std::atomic<uint64_t> requests_{0};
  std::atomic<int64_t> measured_{0};     // intended for the measurement, and sent
  int64_t due_unsent_ = 0;               // the dispatcher thread's, until joined
  std::atomic<bool> stopping_{false};    // no new requests
  std::atomic<bool> abandoning_{false};  // calls in flight are being cancelled
  std::atomic<int64_t> last_answer_ns_{0};

  Mutex mutex_;
  CondVar changed_;
  std::vector<Slot*> free_ ATTEND_GUARDED_BY(mutex_);
  int64_t outstanding_ ATTEND_GUARDED_BY(mutex_) = 0;
  // Destruction order: senders before the objects that they send through.
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::atomic<uint64_t> next_stream_{0};
  std::unique_ptr<TimerThread> timer_;
  double shown_bytes_ = 0;
};

}  // namespace attend::client

// SPDX-License-Identifier: Apache-2.0
//
// One call of the C interface, from start to answer. It has ended once three conditions hold: the
// starting function has called Started, the answer has arrived, and gRPC has released the caller's
// memory. Thread-safe.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "client/c/client_state.h"
#include "client/session.h"

namespace attend::client::c {

class CallState : public std::enable_shared_from_this<CallState> {
 public:
  CallState(const std::shared_ptr<ClientState>& client, const attend_client_params& params)
      : client_(client), done_(params.done), user_(params.user) {}
  ~CallState();
  CallState(const CallState&) = delete;
  CallState& operator=(const CallState&) = delete;

  // Exactly one of Start and StartOn, then Started.
  // On the client's connections. Sent a second time, as a message or in chunks, if the server does
  // not know the shared memory that the call was placed in.
  void Start(const attend_client_params& params);
  // On a stream, on sessions, or both. `stream` may be null and `sessions` empty.
  void StartOn(Stream* stream, const std::vector<Session*>& sessions, int32_t layer,
               const attend_client_params& params);

  // Must be called without any lock that a `done` may take: `done` runs here if the call was
  // refused.
  void Started();

  // False: timed out. nullopt: no limit.
  bool Wait(std::optional<std::chrono::nanoseconds> timeout);
  void Cancel();
  // Null before the call has ended.
  const CallOutcome* outcome() const;
  // After the end: fills in the answer, and copies one of its tensors.
  void Fill(attend_client_answer* answer) const;
  Status Copy(const attend_client_tensor& tensor, void* to, int32_t to_memory, void* stream) const;
  void Used(void* stream);

  // Runs `function`, which waits for the client or releases it. A thread inside a `done` is one of
  // the client's and must do neither, so there it runs on a new thread.
  static void OutOfDone(std::function<void()> function);

 private:
  struct Sent {
    SharedCall shared;
    CallOptions options;
  };
  // Reads the params, prepares the client if necessary and places the tensors. `share`: what the
  // kind of call allows.
  Status Read(const attend_client_params& params, ShareOptions share, Sent* sent);
  // Owner of the caller's tensors; its release is a condition of the end.
  std::shared_ptr<const void> Borrow();
  // Stores the attempt's handle. `again`: of the second attempt.
  void Keep(CallHandle handle, bool again = false);
  void Answered(CallOutcome outcome);
  // True: the call was sent again.
  bool SentAgain(const CallOutcome& outcome);
  // References to shared memory, to be released without the lock.
  struct Placed {
    std::shared_ptr<RegionPool> pool = {}, owner = {};
    std::optional<DeviceAnswer> on_device = {};
    std::shared_ptr<SharedRegion> inputs = {}, outputs = {};
  };
  // Reports that the server does not know the memory or is unreachable; for a call on sessions,
  // that this is possible.
  void Lose(const std::shared_ptr<RegionPool>& pool, bool in_session, Code code);
  // True if the call ends now; the caller then runs RunDone, without the lock.
  bool Ends() ATTEND_REQUIRES(mutex_);
  void RunDone() const;

  // Weak: the last owner must not be one of the client's threads.
  const std::weak_ptr<ClientState> client_;
  const attend_client_done done_;
  void* const user_;

  mutable Mutex mutex_;
  CondVar changed_;
  CallHandle handle_ ATTEND_GUARDED_BY(mutex_);
  bool sent_again_ ATTEND_GUARDED_BY(mutex_) = false;  // handle_ is the second attempt's
  bool started_ ATTEND_GUARDED_BY(mutex_) = false;
  bool cancelled_ ATTEND_GUARDED_BY(mutex_) = false;
  bool answered_ ATTEND_GUARDED_BY(mutex_) = false;
  bool released_ ATTEND_GUARDED_BY(mutex_) = false;
  bool ended_ ATTEND_GUARDED_BY(mutex_) = false;
  CallOutcome outcome_ ATTEND_GUARDED_BY(mutex_);
  // For a call in shared memory: the call as given, to be sent again without it until deadline_.
  std::optional<AttentionCall> plain_ ATTEND_GUARDED_BY(mutex_);
  DeviceTensors devices_ ATTEND_GUARDED_BY(mutex_);  // of plain_
  bool in_session_ ATTEND_GUARDED_BY(mutex_) = false;
  CallOptions options_ ATTEND_GUARDED_BY(mutex_);
  TimePoint deadline_ ATTEND_GUARDED_BY(mutex_) = kNever;
  // Regions return to `owner`: the inputs' with the answer, the answer's with this object.
  Placed placed_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client::c

struct attend_client_call {
  std::shared_ptr<attend::client::c::CallState> state;
};

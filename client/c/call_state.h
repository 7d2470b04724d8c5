// SPDX-License-Identifier: Apache-2.0
//
// One call of the C interface, from its start to its answer. It has ended when the function that
// starts it is done with it, the answer is there, and gRPC has let go of the caller's memory.
// Thread-safe.

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

  // Exactly one of these two, then Started.
  // On the client's connections; once more, as a message or in chunks, if the server does not know
  // the shared memory that it was placed in.
  void Start(const attend_client_params& params);
  // On a stream, on sessions, or both. `stream` may be null and `sessions` empty.
  void StartOn(Stream* stream, const std::vector<Session*>& sessions, int32_t layer,
               const attend_client_params& params);

  // Where no lock is held that a `done` may want: it runs here if the call has been refused.
  void Started();

  // False: the time is over first. None: however long.
  bool Wait(std::optional<std::chrono::nanoseconds> timeout);
  void Cancel();
  // Null before the end.
  const CallOutcome* outcome() const;
  // Of an outcome that is there: the answer, and a copy of one of its tensors.
  void Fill(attend_client_answer* answer) const;
  Status Copy(const attend_client_tensor& tensor, void* to, int32_t to_memory, void* stream) const;
  void Used(void* stream);

  // Runs `function`, which waits for the client or lets go of it: on a thread of its own if this
  // one runs a `done`, which is the client's and must do neither.
  static void OutOfDone(std::function<void()> function);

 private:
  struct Sent {
    SharedCall shared;
    CallOptions options;
  };
  // Reads the params, prepares the client if need be and places the tensors.
  // `share`: what the kind of call allows.
  Status Read(const attend_client_params& params, ShareOptions share, Sent* sent);
  // Owns the caller's tensors; that it is let go is a condition of the end.
  std::shared_ptr<const void> Borrow();
  // `again`: it is the second attempt's.
  void Keep(CallHandle handle, bool again = false);
  void Answered(CallOutcome outcome);
  // True: it was sent again.
  bool SentAgain(const CallOutcome& outcome);
  // Holds on to shared memory, and is let go of without the lock.
  struct Placed {
    std::shared_ptr<RegionPool> pool = {}, owner = {};
    std::optional<DeviceAnswer> on_device = {};
    std::shared_ptr<SharedRegion> inputs = {}, outputs = {};
  };
  // The server does not know the memory or cannot be reached; or, of a session's call, perhaps.
  void Lose(const std::shared_ptr<RegionPool>& pool, bool in_session, Code code);
  // Whether it ends here. Then RunDone, without the lock.
  bool Ends() ATTEND_REQUIRES(mutex_);
  void RunDone() const;

  // Not an owner: the last one must not be a thread of the client's.
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
  // Of a call in shared memory: as it was given, to be sent again without, and until when.
  std::optional<AttentionCall> plain_ ATTEND_GUARDED_BY(mutex_);
  DeviceTensors devices_ ATTEND_GUARDED_BY(mutex_);  // of it
  bool in_session_ ATTEND_GUARDED_BY(mutex_) = false;
  CallOptions options_ ATTEND_GUARDED_BY(mutex_);
  TimePoint deadline_ ATTEND_GUARDED_BY(mutex_) = kNever;
  // The regions go back to `owner`: the inputs' with the answer, the answer's with this object.
  Placed placed_ ATTEND_GUARDED_BY(mutex_);
};

}  // namespace attend::client::c

struct attend_client_call {
  std::shared_ptr<attend::client::c::CallState> state;
};

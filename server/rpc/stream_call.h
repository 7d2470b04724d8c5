// SPDX-License-Identifier: Apache-2.0
//
// A call with many requests, such as AttendStream. It reads only while fewer than
// stream_requests_max of its requests are unanswered; beyond that, requests wait in the client.
// Answers are written one at a time, in the order in which they become ready, or in request order
// if the format requires it.
//
//   reading --1--> over --2--> finished
//
// 1  The client half-closed or cancelled, a write failed, the server drains, there is no memory for
//    a message, or the caller lost its right: reading stops.
// 2  NextLocked: every request that was read is answered or dropped, and no write is in progress.
//    Exactly one thread is given kFinish.
//
// A request counts as unanswered until its answer has been written, or cannot be.
//
// The transport enters through the On... methods, the engine through Finish. A mutex guards the
// state and is never held across a call that may call back.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "kernels/util/mutex.h"
#include "server/rpc/call_context.h"
#include "server/rpc/h2_wire.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/standing_caller.h"
#include "server/transport/server_call.h"
#include "server/wire/message_format.h"

namespace attend {

class StreamCall final : public CallHandler, public Call, public OpenCall {
 public:
  // `format` must outlive the call. `hold`: its place among its tenant's streams, until it ends.
  StreamCall(ServiceContext& context, const CallFacts& facts, const MessageFormat& format,
             std::optional<Pass> asked, H2Wire&& wire, CountHold hold);
  // Creates and begins a call of the method, whose name must outlive it. Without a pass each
  // request names its own. Returns the call's handler, also if the call was refused.
  static CallHandler* Open(ServiceContext& context, std::string_view method,
                           const MessageFormat& format, std::optional<Pass> asked,
                           ServerCall& call);

  void Begin();
  // OpenCall. Stops reading.
  void EndWhenIdle() override;
  void Recheck() override;

  // Call
  void OnQueueing(uint64_t id) override;
  void Finish(std::unique_ptr<Request> request) override;
  std::string Peer() const override { return wire_.Peer(); }

  // CallHandler
  void OnMessage(InMessage message) override;
  std::shared_ptr<MessagePlaces> Place(std::span<const MessagePiece> begun, int64_t bytes) override;
  void OnHalfClose() override;
  void OnWritten(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Step { kNone, kRead, kFinish };

  ~StreamCall() override = default;
  // The next step after a state change; at most one thread acts on a step at a time.
  Step NextLocked() ATTEND_REQUIRES(mutex_);
  // In the On... functions this object is alive. On other threads it is alive only while a request
  // of theirs is unanswered, or for kFinish, which only one thread is given.
  void Do(Step step);
  void Respond(std::unique_ptr<Request> request);
  // Queues the answer of the request at `place`.
  void Answer(uint64_t place, OutMessage answer);
  // Records the answer at `place`, or that there is none, and queues what may be written now.
  void QueueLocked(uint64_t place, std::optional<OutMessage> answer) ATTEND_REQUIRES(mutex_);
  // Nothing can be written any more: drops answers that wait for earlier ones.
  void BreakLocked(std::map<uint64_t, std::optional<OutMessage>>& dropped) ATTEND_REQUIRES(mutex_);
  // Drops the message and stops reading; the call ends with `status` once earlier ones are
  // answered.
  void Stop(uint64_t place, Status status);
  // The next answer if none is being written; the caller must write it.
  std::optional<OutMessage> TakeNextLocked() ATTEND_REQUIRES(mutex_);
  void Write(std::optional<OutMessage> answer);

  ServiceContext& context_;
  const CallFacts facts_;
  const MessageFormat& format_;
  const std::optional<Pass> asked_;
  const H2Wire wire_;
  const TimePoint deadline_;
  StandingCaller caller_{context_, wire_, facts_, Scope::kCompute};
  CountHold hold_;  // released by the thread with kFinish
  const WatchedRef watched_ = std::make_shared<WatchedCall>();

  Mutex mutex_;
  std::deque<OutMessage> answers_ ATTEND_GUARDED_BY(mutex_);  // ready to be written
  // If answers are ordered: those that wait for earlier ones, by place.
  std::map<uint64_t, std::optional<OutMessage>> early_ ATTEND_GUARDED_BY(mutex_);
  uint64_t read_ ATTEND_GUARDED_BY(mutex_) = 0;  // number of messages read; place of the next one
  uint64_t next_place_ ATTEND_GUARDED_BY(mutex_) = 0;  // place of the next answer to queue
  // Requests that may be queued in the engine.
  std::vector<uint64_t> queued_ ATTEND_GUARDED_BY(mutex_);
  int64_t unanswered_ ATTEND_GUARDED_BY(mutex_) = 0;  // read, but answer not written
  bool reading_ ATTEND_GUARDED_BY(mutex_) = false;
  bool writing_ ATTEND_GUARDED_BY(mutex_) = false;
  bool half_closed_ ATTEND_GUARDED_BY(mutex_) = false;  // the client sends no more
  bool broken_ ATTEND_GUARDED_BY(mutex_) = false;       // answers can no longer be written
  bool ending_ ATTEND_GUARDED_BY(mutex_) = false;       // the server is ending the stream
  // Why a message was dropped and no more are accepted.
  std::optional<Status> stopped_ ATTEND_GUARDED_BY(mutex_);
  bool finished_ ATTEND_GUARDED_BY(mutex_) = false;
  bool admitted_ ATTEND_GUARDED_BY(mutex_) = false;  // whether any request was admitted
};

}  // namespace attend
